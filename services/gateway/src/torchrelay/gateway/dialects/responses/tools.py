"""Tools in the body of a Responses request, as a chat template gets them, and the calls of them. Pure.

Chat templates know functions. A custom tool, which takes any text, is shown to them as a function with a single
string, ``input``. The functions of a namespace are shown as ``NAMESPACE__NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.strict_schemas import check_strict
from torchrelay.gateway.bodies.tools import MAX_TOOLS, TOOL_NAME, check_allowed

S = TypeVar("S", bound=msgspec.Struct)
INPUT: Final = "input"  # the parameter of a custom tool
# Tools that OpenAI's servers run, or that its models were trained on. A template is not shown them.
_HOSTED: Final = frozenset(
    (
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"),
        *("computer", "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search"),
        "programmatic_tool_calling",
    )
)
_DATED: Final = ("web_search_", "computer_use_preview_")  # followed by a date


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _InputFormat(msgspec.Struct):
    type: str
    syntax: str = ""
    definition: str = ""


class _Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: _InputFormat | None = None


class _Namespace(msgspec.Struct):
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


@dataclass(frozen=True, slots=True)
class ToolName:
    """The name of a tool as its client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def shown(self) -> str:
        """The name as the model knows it."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


@dataclass(slots=True)
class Tools:
    """The declared tools that a model is shown."""

    declared: list[dict[str, Any]] = field(default_factory=list)  # as in the request, without those that are hosted
    functions: list[dict[str, Any]] = field(default_factory=list)  # as a chat template gets them
    names: dict[str, ToolName] = field(default_factory=dict)  # by the name as the model knows it
    num_strict_parts: int = 0  # of the schemas of strict functions


def tools_of(given: list[dict[str, Any]]) -> Tools:
    """Raises ``InvalidRequest`` naming the faulty tool."""
    tools = Tools()
    _check_number(given, "tools")
    for index, tool in enumerate(given):
        where, kind = f"tools[{index}]", tool.get("type")
        if str(kind) in _HOSTED or str(kind).startswith(_DATED):
            continue
        tools.declared.append(tool)
        if kind != "namespace":
            _add(tools, tool, where)
            continue
        namespace = _converted(tool, _Namespace, where)
        _check_name(namespace.name, where)
        _check_number(namespace.tools, f"{where}.tools")
        preface = f"{namespace.name}: {namespace.description}\n\n" if namespace.description else ""
        for place, inner in enumerate(namespace.tools):
            _add(tools, inner, f"{where}.tools[{place}]", namespace.name, preface)
            preface = ""
    return tools


def _add(tools: Tools, tool: Mapping[str, Any], where: str, namespace: str | None = None, preface: str = "") -> None:
    """Adds a function or custom tool. ``preface``: to its description."""
    kind = tool.get("type")
    if kind == "function":
        function = _converted(tool, _Function, where)
        is_strict = bool(function.strict)
        description, parameters = function.description, function.parameters or {"type": "object", "properties": {}}
        if is_strict:
            tools.num_strict_parts = check_strict(parameters, f"{where}.parameters", "tools", tools.num_strict_parts)
        name = ToolName(function.name, namespace)
    elif kind == "custom":
        is_strict = False
        custom = _converted(tool, _Custom, where)
        description, parameters = custom.description, _input_parameter(custom.format, where)
        name = ToolName(custom.name, namespace, is_custom=True)
    else:
        message = (
            f"{where}.type must be function, custom or namespace, or that of a hosted tool, not {str(kind)[:40]!r}"
        )
        raise InvalidRequest(message, field="tools")
    _check_name(name.name, where)
    if name.shown in tools.names:
        raise InvalidRequest(f"{where} has the name of another tool, {name.shown!r}", field="tools")
    if len(tools.names) == MAX_TOOLS:
        message = f"tools has more than {MAX_TOOLS} entries, with those of its namespaces"
        raise InvalidRequest(message, field="tools")
    tools.names[name.shown] = name
    shown: dict[str, Any] = {"name": name.shown}
    if description or preface:
        shown["description"] = f"{preface}{description or ''}".rstrip()
    if is_strict:
        shown["strict"] = True
    tools.functions.append({"type": "function", "function": {**shown, "parameters": parameters}})


def chat_choice(choice: Any, tools: Tools) -> Any:
    """A ``tool_choice`` as chat completions have it, with the names that the model knows."""
    match choice:
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            check_allowed(allowed)
            shown = [_chat_tool(each, tools) for each in allowed]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": shown}}
    return _chat_tool(choice, tools)


def _chat_tool(choice: Any, tools: Tools) -> Any:
    """The tool that ``choice`` names, as chat completions name it; anything else as it is."""
    match choice:
        case {"type": "function" | "custom", "name": str(name)}:
            named = (key for key, tool in tools.names.items() if tool.name == name and _is_of(tool, choice))
            return {"type": "function", "name": next(named, name)}
    return choice


def _is_of(tool: ToolName, choice: Mapping[str, Any]) -> bool:
    return choice.get("namespace") in (None, tool.namespace)


def _input_parameter(given: _InputFormat | None, where: str) -> dict[str, Any]:
    """The parameters of a custom tool as a function. The model is told of a grammar, but not held to it."""
    text: dict[str, Any] = {"type": "string"}
    if given is not None and given.type == "grammar":
        text["description"] = f"Text in this {given.syntax} grammar:\n{given.definition}"
    elif given is not None and given.type != "text":
        message = f"{where}.format.type must be text or grammar, not {given.type[:40]!r}"
        raise InvalidRequest(message, field="tools")
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}


def _check_number(tools: list[dict[str, Any]], where: str) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{where} has {len(tools)} entries; at most {MAX_TOOLS} are allowed", field="tools")


def _check_name(name: str, where: str) -> None:
    if not TOOL_NAME.fullmatch(name):
        message = f"{where}.name must have 1 to 64 letters, digits, _ or -, not {name[:80]!r}"
        raise InvalidRequest(message, field="tools")


def _converted(tool: Mapping[str, Any], kind: type[S], where: str) -> S:
    try:
        return msgspec.convert(tool, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {str(error).replace('`$.', '`')}", field="tools") from error
