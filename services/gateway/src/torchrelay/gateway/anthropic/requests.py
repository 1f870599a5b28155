"""Request bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, decoded and validated.

``cache_control`` and ``metadata`` change no answer here and are ignored, as are unknown fields. A model thinks as its
template says; ``thinking`` decides whether the answer shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat
from torchrelay.gateway.inference.core import ChatMessage, GenerateParams
from torchrelay.gateway.inference.parameter_ranges import check_num_messages, check_sampling
from torchrelay.gateway.openai.answer_formats import schema_rule
from torchrelay.gateway.openai.body_decoder import decode
from torchrelay.gateway.openai.tools import chosen_tools, declared_tools

_ROLES: Final = ("user", "assistant")
_THOUGHTS: Final = ("thinking", "redacted_thinking")  # blocks of earlier answers
# What changes no answer here: names of callers, hints for caches, and the wish for a faster answer.
IGNORED: Final = frozenset(("metadata", "cache_control", "diagnostics", "speed", "user_profile_id", "workspace_id"))
_REFUSED: Final = ("container", "inference_geo")
_TIERS: Final = {"auto": "auto", "standard_only": "default"}


class Block(msgspec.Struct):
    """A part of a message. Each type uses some of the fields."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    thinking: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Block]


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    """``budget_tokens`` is a hint: nothing ends the reasoning of a model before ``max_tokens``."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None


class Body(msgspec.Struct, kw_only=True):
    model: str
    messages: list[Message]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    service_tier: str | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    container: Any = None
    inference_geo: Any = None


_DECODER: msgspec.json.Decoder[Body] = msgspec.json.Decoder(Body)


def decode_body(encoded: bytes | bytearray) -> Body:
    """Raises ``InvalidRequest`` naming the faulty field."""
    body = decode(_DECODER, encoded, IGNORED)
    for name in _REFUSED:
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is not supported yet", field=name)
    return body


def shows_reasoning(body: Body) -> bool:
    """Whether the answer has blocks of thinking: only if the request asks for them, as Anthropic's answers."""
    thinking = body.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def params_of(body: Body) -> GenerateParams:
    """The parameters of a request for an answer. Raises ``InvalidRequest``."""
    if body.max_tokens is None:
        raise InvalidRequest("max_tokens is missing", field="max_tokens")
    if body.messages and body.messages[-1].role == "assistant":
        message = "messages must end with the user's: an answer whose beginning is given is not supported yet"
        raise InvalidRequest(message, field="messages")
    return prompt_of(body)


def prompt_of(body: Body) -> GenerateParams:
    """The parameters of a request for its number of prompt tokens. Raises ``InvalidRequest``."""
    check_num_messages(len(body.messages))
    if (tier := body.service_tier or "auto") not in _TIERS:
        message = f"service_tier must be auto or standard_only, not {tier[:40]!r}"
        raise InvalidRequest(message, field="service_tier")
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    checked = check_sampling(sampling, {}, body.stop_sequences or [], [], _TIERS[tier])
    tools, format_ = _tools(body)
    return GenerateParams(
        model=body.model,
        messages=tuple(_messages(body)),
        tools=tools,
        answer_format=format_,
        max_tokens=body.max_tokens,
        **sampling,
        **checked,
    )


def _tools(body: Body) -> tuple[tuple[dict[str, Any], ...], AnswerFormat | None]:
    """The tools as OpenAI has them, which chat templates expect, and the format of the answer."""
    declared: list[dict[str, Any]] = []
    for index, tool in enumerate(body.tools or []):
        if tool.get("type", "custom") != "custom":
            message = f"tools[{index}] of type {str(tool['type'])[:40]!r} is not supported; only custom tools are"
            raise InvalidRequest(message, field="tools")
        function: dict[str, Any] = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        function["parameters"] = tool.get("input_schema")
        declared.append({"type": "function", "function": function})
    given = body.tool_choice or ToolChoice("auto")
    choice: Any = given.type
    match given:
        case ToolChoice("auto" | "none"):
            pass
        case ToolChoice("any"):
            choice = "required"
        case ToolChoice("tool", str(name)):
            choice = {"type": "function", "name": name}
        case _:
            message = f"tool_choice must be auto, any, none, or a tool with its name, not {given.type[:40]!r}"
            raise InvalidRequest(message, field="tool_choice")
    return chosen_tools(declared_tools(declared), choice, not given.disable_parallel_tool_use, _format(body))


def _format(body: Body) -> AnswerFormat | None:
    if body.output_config is None or (asked := body.output_config.format) is None:
        return None
    if asked.type != "json_schema":
        message = f"output_config.format.type must be json_schema, not {asked.type[:40]!r}"
        raise InvalidRequest(message, field="output_config")
    return AnswerFormat(content=schema_rule(asked.schema, "output_config"), field="output_config")


def _messages(body: Body) -> Iterator[ChatMessage]:
    if body.system:
        yield {"role": "system", "content": _text(body.system, "system")}
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        if message.role not in _ROLES:
            wrong = f"{where}.role must be one of {', '.join(_ROLES)}, not {message.role[:40]!r}"
            raise InvalidRequest(wrong, field="messages")
        if message.role == "assistant":
            yield _answer(message.content, where)
        else:
            yield from _users(message.content, where)


def _users(content: str | list[Block], where: str) -> Iterator[ChatMessage]:
    """A user's message, after a message for each result of a tool in it."""
    blocks = [Block("text", content)] if isinstance(content, str) else content
    results = [block for block in blocks if block.type == "tool_result"]
    for block in results:
        message: ChatMessage = {"role": "tool", "content": _text(block.content or "", where)}
        yield message if block.tool_use_id is None else {**message, "tool_call_id": block.tool_use_id}
    texts = [block for block in blocks if block.type != "tool_result"]
    if texts or not results:
        text = _text(texts, where)
        if not text:
            raise InvalidRequest(f"{where} of role user must have content", field="messages")
        yield {"role": "user", "content": text}


def _answer(content: str | list[Block], where: str) -> ChatMessage:
    """An earlier answer, with its calls of tools."""
    blocks = [Block("text", content)] if isinstance(content, str) else content
    texts = [block for block in blocks if block.type not in (*_THOUGHTS, "tool_use")]
    message: ChatMessage = {"role": "assistant", "content": _text(texts, where)}
    if thoughts := "\n".join(block.thinking for block in blocks if block.type == "thinking" and block.thinking):
        message["reasoning_content"] = thoughts
    calls = [block for block in blocks if block.type == "tool_use"]
    if calls:
        message["tool_calls"] = [
            {"id": block.id or "", "type": "function", "function": {"name": block.name, "arguments": block.input or {}}}
            for block in calls
        ]
    return message


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            message = f"{where} has content of type {block.type[:40]!r}, which is not supported here; send text"
            raise InvalidRequest(message, field=where.partition("[")[0])
    return "\n".join(block.text or "" for block in content)
