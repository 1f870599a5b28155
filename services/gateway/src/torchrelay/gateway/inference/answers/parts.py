"""The parts of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call; ``index`` is its place among the calls of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the call with this index: JSON, as the model wrote it."""

    index: int
    text: str


Part: TypeAlias = str | Reasoning | CallBegin | CallArguments  # a str is a piece of the content


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """The text of an answer, divided."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def joined(parts: Iterable[Part]) -> ParsedAnswer:
    """The whole of all parts of an answer."""
    answer, content, reasoning = ParsedAnswer(), list[str](), list[str]()
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case str():
                content.append(part)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin():
                answer.calls.append(ToolCall(part.id, part.name))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    answer.content, answer.reasoning = "".join(content), "".join(reasoning)
    for call, pieces in zip(answer.calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return answer


# By tool: the schema that declares the types of its parameters.
ParameterTypes: TypeAlias = Mapping[str, Mapping[str, Any]]


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> ParameterTypes:
    """The schemas of the parameters of ``tools``, which are in OpenAI's format."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}
