"""Request bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, decoded and validated.

``cache_control`` and ``metadata`` change no answer here and are ignored, as are unknown fields. A model thinks as its
template says; ``thinking`` decides whether the answer shows it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.answer_formats import schema_rule
from torchrelay.gateway.bodies.body_decoder import OtherFields, decode
from torchrelay.gateway.bodies.strict_schemas import check_strict
from torchrelay.gateway.bodies.tools import NO_PARAMETERS, chosen_tools
from torchrelay.gateway.dialects.anthropic.conversation import Block, Conversation, Message
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.parameter_ranges import (
    check_continued,
    check_num_messages,
    check_sampling,
    is_continuable,
)

MAX_TOOLS: Final = 1024  # a coding agent with several servers of tools declares hundreds
_TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# What changes no answer here: names of callers, hints for caches, and the wish for a faster answer.
FIELDS: Final = OtherFields(
    frozenset(("metadata", "cache_control", "diagnostics", "speed", "user_profile_id", "workspace_id")),
    {"container": None, "inference_geo": None},
)
_TIERS: Final = {"auto": "auto", "standard_only": "default"}


class Tool(msgspec.Struct):
    """A tool that the client runs, or with a ``type`` one that Anthropic's servers or clients know."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


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
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    service_tier: str | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


_DECODER: msgspec.json.Decoder[Body] = msgspec.json.Decoder(Body)


def decode_body(encoded: bytes | bytearray) -> Body:
    """Raises ``InvalidRequest`` naming the faulty field."""
    return decode(_DECODER, encoded, FIELDS)


def shows_reasoning(body: Body) -> bool:
    """Whether the answer has blocks of thinking: only if the request asks for them, as Anthropic's answers."""
    thinking = body.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def params_of(body: Body) -> GenerateParams:
    """The parameters of a request for an answer. Raises ``InvalidRequest``."""
    if body.max_tokens is None:
        raise InvalidRequest("max_tokens is missing", field="max_tokens")
    params = prompt_of(body)
    if params.messages and params.messages[-1]["role"] == "assistant":
        check_continued(params.messages[-1], params.answer_format)
    return params


def prompt_of(body: Body) -> GenerateParams:
    """The parameters of a request for its number of prompt tokens. Raises ``InvalidRequest``."""
    check_num_messages(len(body.messages))
    if (tier := body.service_tier or "auto") not in _TIERS:
        message = f"service_tier must be auto or standard_only, not {tier[:40]!r}"
        raise InvalidRequest(message, field="service_tier")
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    checked = check_sampling(sampling, {}, body.stop_sequences or [], [], _TIERS[tier], "stop_sequences")
    conversation = Conversation(body.system)
    for index, turn in enumerate(body.messages):
        try:
            conversation.add(turn, f"messages[{index}]")
        except RecursionError:
            raise InvalidRequest(f"messages[{index}] is nested too deeply", field="messages") from None
    if not conversation.has_turns:
        raise InvalidRequest("messages must have a turn of the user", field="messages")
    tools, format_ = _tools(body, _functions(body.tools or [], conversation))
    messages = conversation.messages()
    return GenerateParams(
        model=body.model,
        messages=messages,
        continues_last=is_continuable(messages[-1]),
        tools=tools,
        answer_format=format_,
        max_tokens=body.max_tokens,
        left_out=tuple(sorted(conversation.left_out)),
        **sampling,
        **checked,
    )


def _functions(tools: list[Tool], conversation: Conversation) -> tuple[dict[str, Any], ...]:
    """The tools as OpenAI has them, which chat templates expect.

    Those that other servers run are left out. Those with ``defer_loading`` follow once a result of a tool refers to
    them.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools):,} entries; at most {MAX_TOOLS:,} are allowed", field="tools")
    shown: dict[str, dict[str, Any]] = {}
    deferred: dict[str, dict[str, Any]] = {}
    num_parts = 0
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            conversation.left_out.add("tool")
            continue
        where = f"tools[{index}]"
        if not _TOOL_NAME.fullmatch(tool.name):
            message = f"{where}.name must have 1 to 128 letters, digits, _ or -, not {tool.name[:140]!r}"
            raise InvalidRequest(message, field="tools")
        parameters = NO_PARAMETERS if tool.input_schema is None else tool.input_schema
        if tool.strict:
            num_parts = check_strict(parameters, f"{where}.input_schema", "tools", num_parts)
        function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
        given = {name: value for name, value in function.items() if value is not None}
        if tool.name in shown or tool.name in deferred:
            raise InvalidRequest(f"{where} has the name of another tool, {tool.name!r}", field="tools")
        entry = {"type": "function", "function": {**given, "parameters": parameters}}
        (deferred if tool.defer_loading else shown)[tool.name] = entry
    return (*shown.values(), *(deferred[name] for name in conversation.referenced if name in deferred))


def _tools(body: Body, functions: tuple[dict[str, Any], ...]) -> tuple[tuple[dict[str, Any], ...], AnswerFormat | None]:
    """The tools that the prompt shows, and the format of the answer."""
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
    return chosen_tools(functions, choice, not given.disable_parallel_tool_use, _format(body))


def _format(body: Body) -> AnswerFormat | None:
    if body.output_config is None or (asked := body.output_config.format) is None:
        return None
    if asked.type != "json_schema":
        message = f"output_config.format.type must be json_schema, not {asked.type[:40]!r}"
        raise InvalidRequest(message, field="output_config")
    return AnswerFormat(content=schema_rule(asked.schema, "output_config"), field="output_config")
