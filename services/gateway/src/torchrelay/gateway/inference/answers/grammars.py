"""The grammars that hold answers to their formats, in Lark as llguidance reads it. Pure.

An answer is reasoning, if the model thinks, then text, calls of tools, or both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec.structs import replace

from torchrelay.gateway.inference.answers.answer_format import JSON_STYLE, AnswerFormat
from torchrelay.gateway.inference.answers.schemas import binding_schema
from torchrelay.gateway.inference.answers.syntax import ARGUMENTS, AnswerSyntax

SpecialId: TypeAlias = Callable[[str], int | None]  # the id of a special token, which is no text; None: it is text
_JSON = "%json "
_ANY_TEXT = "/(.|\\n)*/"
_SPACE = "[\\s\\x1c-\\x1f]"  # what the parser of answers skips


class UnsupportedFormat(Exception):
    """The model's syntax of calls allows no such format."""


def grammar_source(
    format_: AnswerFormat, tools: Sequence[dict[str, Any]], syntax: AnswerSyntax, special_id: SpecialId
) -> str:
    """The grammar of an answer that may call ``tools``; empty if any text will do.

    The arguments of strict tools follow their schemas. Those of others do if calls have a format for another reason,
    as far as the keywords are known. Raises ``UnsupportedFormat``.
    """
    if format_.grammar:
        return format_.grammar
    format_ = replace(format_, content=_binding(format_.content))
    functions = [tool["function"] for tool in tools]
    called = [function for function in functions if format_.tool in ("", function["name"])]
    is_any_strict = any(function.get("strict") for function in functions)
    limits_calls = format_.needs_call or bool(format_.content) or not format_.allows_several_calls or is_any_strict
    if called and limits_calls:
        rules = _CallRules(syntax, special_id).rules(format_, called)
    elif format_.content:
        rules = _content_rules("answer", format_.content, _not_reasoning(syntax))
    else:
        return ""
    return "\n".join([*_start(syntax, special_id), *rules])


def _binding(content: str) -> str:
    """The rule of a content; of JSON without what only annotates its schema."""
    if not content.startswith(_JSON):
        return content
    return _JSON + json.dumps(binding_schema(json.loads(content.removeprefix(_JSON))))


def _start(syntax: AnswerSyntax, special_id: SpecialId) -> list[str]:
    if syntax.thoughts is None:
        return ["start: answer"]
    opening, closing = (_Marker.of(marker, special_id) for marker in syntax.thoughts)
    thought, rules = _until(closing, "thought")
    if syntax.begins_thinking:
        prefix = f"{thought} SPACE"
    elif opening.is_special:
        prefix = f"({opening.rule} {thought} SPACE)?"
    else:
        prefix = f"(opening {thought} SPACE)?"
        rules.append(f"opening[lazy]: /{_SPACE}*{_escaped(opening.text)}/")
    return [f"start: {prefix} answer", "SPACE: /[ \\n]{0,3}/", *rules]


def _not_reasoning(syntax: AnswerSyntax) -> str:
    """The end of a pattern that excludes text which the parser takes for reasoning; empty if there is none."""
    if syntax.thoughts is None or syntax.begins_thinking:
        return ""
    return f" & ~/{_SPACE}*{_escaped(syntax.thoughts[0])}(.|\\n)*/"


def _without(marker: str) -> str:
    """The end of a pattern that excludes text with a marker, which the parser sees in whichever tokens it is."""
    return f" & ~/(.|\\n)*{_escaped(marker)}(.|\\n)*/"


def _content_rules(name: str, content: str, excluded: str) -> list[str]:
    if not excluded or content.startswith(_JSON):  # JSON does not begin like reasoning, and escapes quotes in strings
        return [f"{name}: {content}"]
    return [f"{name}: CONTENT", f"CONTENT: ({content}){excluded}"]


@dataclass(frozen=True, slots=True)
class _Marker:
    text: str
    rule: str
    is_special: bool

    @classmethod
    def of(cls, text: str, special_id: SpecialId) -> _Marker:
        number = special_id(text)
        if number is None:
            return cls(text, json.dumps(text, ensure_ascii=False), False)
        return cls(text, f"<[{number}]>", True)


def _until(marker: _Marker, name: str, excluded: str = "") -> tuple[str, list[str]]:
    """The rule of any text up to the end of the first ``marker``, and the rules that it needs."""
    if marker.is_special:
        before = f"BEFORE_{name.upper()}_END"
        return f"({before} {marker.rule})", [f"{before}: {_ANY_TEXT}{_without(marker.text)}{excluded}"]
    return name, [f"{name}[lazy]: /(.|\\n)*{_escaped(marker.text)}/{excluded}"]


def _escaped(text: str) -> str:
    """The text in a regular expression."""
    return re.sub(r"([!-/:;=?@\[-^`{-~])", r"\\\1", text).replace("\n", "\\n")


class _CallRules:
    """The rules ``answer`` and below, of answers with calls in a syntax."""

    def __init__(self, answers: AnswerSyntax, special_id: SpecialId) -> None:
        syntax = answers.calls
        assert syntax is not None, "tools are refused without a syntax of calls"
        if syntax.style == "xml":
            raise UnsupportedFormat("the model writes calls as XML, whose arguments no format is applied to")
        self._syntax = syntax
        self._opening = _Marker.of(syntax.opening, special_id)
        self._closing = _Marker.of(syntax.closing, special_id) if syntax.closing else None
        self._not_reasoning = _not_reasoning(answers)
        arguments_id = special_id(ARGUMENTS) if syntax.style == "mistral" else None
        self._arguments_marker = None if arguments_id is None else f"<[{arguments_id}]>"

    def rules(self, format_: AnswerFormat, functions: Sequence[dict[str, Any]]) -> list[str]:
        objects = " | ".join(f"call_{number}" for number in range(len(functions)))
        rules = [self._call(number, function) for number, function in enumerate(functions)]
        several = format_.allows_several_calls
        calls, call_rules = self._calls(several=several)
        rules += [f"object: {objects}", *call_rules]
        if format_.needs_call:
            return [f"answer: {calls}", *rules]
        excluded = _without(self._opening.text) + self._not_reasoning
        if format_.content:
            if self._syntax.style == "llama":  # the beginning of a call may be that of the content
                message = "the model writes calls as plain JSON: set tool_choice to none or required"
                raise UnsupportedFormat(message)
            return [f"answer: content | {calls}", *_content_rules("content", format_.content, excluded), *rules]
        if self._syntax.style == "llama":  # text that begins like a call is one
            text = f"/{_SPACE}*([^{{\\s\\x1c-\\x1f](.|\\n)*)?/{excluded}"
            return [f"answer: TEXT | {calls}", f"TEXT: {text}", *rules]
        text, text_rules = _until(self._opening, "text", self._not_reasoning)
        rules += [f"TEXT: {_ANY_TEXT}{excluded}", *text_rules]
        return [f"answer: TEXT | ({text} body)+ TEXT" if several else f"answer: TEXT | {text} body", *rules]

    def _calls(self, *, several: bool) -> tuple[str, list[str]]:
        """The rule of an answer of calls alone, and the rules that it needs; ``body`` is a call after its opening."""
        opening, closing = self._opening.rule, "" if self._closing is None else self._closing.rule
        gap = "[ \\n]{0,5}"
        match self._syntax.style:
            case "llama":
                return f"{opening}? object" + (' (";" /[ \\n]?/ object)*' if several else ""), []
            case "mistral" if self._arguments_marker is None:
                more = " (/, ?/ object)*" if several else ""
                return f"{opening} body", [f'body: /[ \\n]?\\[/ object{more} "]"']
            case "mistral":
                return f"({opening} body)" + ("+" if several else ""), ["body: object"]
        more = f" (/,{gap}/ object)*" if several else ""
        body = f'body: "\\n"? (object | /\\[{gap}/ object{more} /{gap}\\]/) "\\n"? {closing}'
        return f"{opening} body" + (f' ("\\n"? {opening} body)*' if several else ""), [body]

    def _call(self, number: int, function: dict[str, Any]) -> str:
        parameters = {**(function.get("parameters") or {"type": "object"}), "x-guidance": JSON_STYLE}
        if not function.get("strict"):
            parameters["x-guidance"] = {**JSON_STYLE, "lenient": True}
        arguments, name = _JSON + json.dumps(binding_schema(parameters)), function["name"]
        if self._arguments_marker is not None:
            return f'call_{number}: "{name}" {self._arguments_marker} {arguments}'
        key = self._syntax.arguments_keys[-1 if self._syntax.style == "llama" else 0]
        call_id = f'("{self._syntax.id_key}": ?"[0-9]{{1,3}}", ?)?' if self._syntax.id_key else ""
        opening = f'/\\{{ ?{call_id}"{_escaped(self._syntax.name_key)}": ?"{name}", ?"{_escaped(key)}": ?/'
        return f"call_{number}: {opening} {arguments} /[ \\n]?\\}}/"
