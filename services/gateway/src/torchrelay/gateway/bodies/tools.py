"""Tools in the body of a chat request: their declarations, and calls of earlier answers. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.strict_schemas import check_strict
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat

MAX_TOOLS: Final = 128  # as OpenAI
NO_PARAMETERS: Final = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: str
    function: _Function


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON, or what it says


class CalledTool(msgspec.Struct):
    """A call of an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


def declared_tools(tools: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The tools as a chat template gets them. Raises ``InvalidRequest`` naming the faulty one."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", field="tools")
    num_parts = 0
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            message = f"{where}.type must be 'function', not {str(tool.get('type'))[:40]!r}"
            raise InvalidRequest(message, field="tools")
        try:
            function = msgspec.convert(tool, _Tool).function
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{where}: {str(error).replace('`$.', '`')}", field="tools") from error
        if not TOOL_NAME.fullmatch(function.name):
            message = f"{where}.function.name must have 1 to 64 letters, digits, _ or -, not {function.name[:80]!r}"
            raise InvalidRequest(message, field="tools")
        if function.strict:
            parameters = function.parameters or NO_PARAMETERS
            num_parts = check_strict(parameters, f"{where}.function.parameters", "tools", num_parts)
    return tuple(tools)


def chosen_tools(
    tools: tuple[dict[str, Any], ...], choice: Any, parallel: bool | None, format_: AnswerFormat | None
) -> tuple[tuple[dict[str, Any], ...], AnswerFormat | None]:
    """The tools that the prompt shows, and the format of the answer with ``tool_choice`` as ``choice``.

    Raises ``InvalidRequest``.
    """
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a call, but there are no tools to call", field="tool_choice")
    if not tools or choice == "none":
        return (), format_  # a model calls none that it does not know
    match choice:
        case None | "auto":
            needs_call, named = False, ""
        case "required":
            needs_call, named = True, ""
        case {"type": "function", "function": {"name": str(named)}} | {"type": "function", "name": str(named)}:
            needs_call = True
            if named not in (tool["function"]["name"] for tool in tools):
                raise InvalidRequest(f"tool_choice names {named[:80]!r}, which is not among tools", field="tool_choice")
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            check_allowed(allowed)
            names = {_name_of(tool) for tool in allowed}
            shown = tuple(tool for tool in tools if tool["function"]["name"] in names)
            if len({tool["function"]["name"] for tool in shown}) != len(names):
                raise InvalidRequest("tool_choice allows a tool that is not among tools", field="tool_choice")
            return chosen_tools(shown, mode, parallel, format_)
        case _:
            message = 'tool_choice must be "none", "auto", "required", a function or allowed_tools'
            raise InvalidRequest(message, field="tool_choice")
    if format_ is not None and format_.grammar:
        raise InvalidRequest(f"{format_.field} cannot be combined with tools", field=format_.field)
    if needs_call or parallel is False:
        given = format_ or AnswerFormat(field="tools")
        format_ = msgspec.structs.replace(
            given, needs_call=needs_call, tool=named, allows_several_calls=parallel is not False
        )
    return tools, format_


def check_allowed(tools: list[Any]) -> None:
    """Raises ``InvalidRequest`` if a ``tool_choice`` allows more tools than there can be."""
    if len(tools) > MAX_TOOLS:
        message = f"tool_choice allows {len(tools):,} tools; there are at most {MAX_TOOLS}"
        raise InvalidRequest(message, field="tool_choice")


def _name_of(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise InvalidRequest("tool_choice.allowed_tools.tools must be functions with names", field="tool_choice")


def called_tools(calls: list[CalledTool]) -> list[dict[str, Any]]:
    """The calls as chat templates expect them: arguments as objects, unless they are no JSON object."""
    return [
        {
            "id": call.id or "",
            "type": call.type,
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in calls
    ]


def _arguments(text: str | dict[str, Any] | None) -> Any:
    if isinstance(text, dict):
        return text
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text  # a model wrote it, and shall see it again
    return arguments if isinstance(arguments, dict) else text
