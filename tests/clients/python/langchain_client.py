"""LangChain's classes for OpenAI's API."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as tool_of
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.python.settings import EMBEDDING_MODEL, KEY, MODEL, URL, report


class Leg(BaseModel):
    """A part of the relay."""

    runner: Literal["first", "last"]
    is_lit: bool


def weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"rain in {city}"


tool = tool_of(weather)
chat = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0)
answer = chat.invoke("Run.")
report("invoke", {"text": answer.content, "usage": answer.usage_metadata})
report("batch", [each.content for each in chat.batch(["Run.", "Walk.", "Stand."])])
chunks = list(chat.stream("Run."))
report("stream", [chunk.content for chunk in chunks if chunk.content])

question = HumanMessage("Run.")
with_tools = chat.bind_tools([tool])
called = with_tools.invoke([question])
[call] = called.tool_calls
report("tools", {"name": call["name"], "arguments": call["args"]})
result = ToolMessage(tool.invoke(call["args"]), tool_call_id=call["id"])
report("tool_result", with_tools.invoke([question, called, result]).content)
required = chat.bind_tools([tool], tool_choice="required", strict=True, parallel_tool_calls=False)
whole = reduce(add, required.stream([question]))
report("required_tool", [each["name"] for each in whole.tool_calls])

for method in ("json_schema", "function_calling"):
    report(method, chat.with_structured_output(Leg, method=method, strict=True).invoke("Run.").model_dump())

responses = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, use_responses_api=True)
report("responses", responses.invoke("Run.").text)
report("responses_stream", "".join(chunk.text for chunk in responses.stream("Run.")))

embeddings = OpenAIEmbeddings(model=EMBEDDING_MODEL, base_url=URL, api_key=KEY, check_embedding_ctx_length=False)
report("embeddings", [len(vector) for vector in embeddings.embed_documents(["torch", "baton"])])
