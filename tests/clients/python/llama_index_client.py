"""LlamaIndex's class for servers that speak OpenAI's API."""

from __future__ import annotations

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.clients.python.settings import KEY, MODEL, URL, report


class Leg(BaseModel):
    """A part of the relay."""

    runner: Literal["first", "last"]
    is_lit: bool


def weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=4096,
    max_tokens=200,
    max_retries=0,
)
question = [ChatMessage(role="user", content="Run.")]
report("chat", llm.chat(question).message.content)
report("stream", [part.delta for part in llm.stream_chat(question) if part.delta])
report("complete", llm.complete("Run.").text)

tools = [FunctionTool.from_defaults(weather)]
called = llm.chat_with_tools(tools, chat_history=question)
[call] = llm.get_tool_calls_from_response(called)
report("tools", {"name": call.tool_name, "arguments": call.tool_kwargs})
result = ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": call.tool_id})
answered = llm.chat_with_tools(tools, chat_history=[*question, called.message, result])
report("tool_result", answered.message.content)
report("structured", llm.as_structured_llm(Leg).chat(question).raw.model_dump())
