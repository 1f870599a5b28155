"""Tools in the body of a chat request: their declarations, and calls of earlier answers. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from torchrelay.common.errors import InvalidRequest

MAX_TOOLS: Final = 128  # as OpenAI
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


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
    arguments: str = ""  # JSON


class CalledTool(msgspec.Struct):
    """A call of an earlier answer."""

    id: str
    function: CalledFunction
    type: str = "function"


def declared_tools(tools: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The tools as a chat template gets them. Raises ``InvalidRequest`` naming the faulty one."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", field="tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            message = f"{where}.type must be 'function', not {str(tool.get('type'))[:40]!r}"
            raise InvalidRequest(message, field="tools")
        try:
            function = msgspec.convert(tool, _Tool).function
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{where}: {str(error).replace('`$.', '`')}", field="tools") from error
        if not _NAME.fullmatch(function.name):
            message = f"{where}.function.name must have 1 to 64 letters, digits, _ or -, not {function.name[:80]!r}"
            raise InvalidRequest(message, field="tools")
        if function.strict:
            raise InvalidRequest(f"{where}.function.strict is not supported yet", field="tools")
    return tuple(tools)


def called_tools(calls: list[CalledTool]) -> list[dict[str, Any]]:
    """The calls as chat templates expect them: arguments as objects, unless they are no JSON object."""
    return [
        {
            "id": call.id,
            "type": call.type,
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in calls
    ]


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text  # a model wrote it, and shall see it again
    return arguments if isinstance(arguments, dict) else text
