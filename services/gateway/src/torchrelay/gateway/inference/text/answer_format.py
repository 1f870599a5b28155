"""The format that an answer must follow, and the grammar that holds a model to it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

# JSON as models write it, compact or indented, but without endless space.
_JSON_STYLE: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks of an answer. At most one of ``content`` and ``grammar`` is set."""

    content: str = ""  # the right side of a Lark rule for the text; empty: any text
    grammar: str = ""  # a whole grammar, in Lark or GBNF
    field: str = "response_format"  # of the request, for errors
    tool: str = ""  # that is called; empty: any of the tools
    needs_call: bool = False  # at least one tool is called
    allows_several_calls: bool = True


def json_rule(schema: Any) -> str:
    """The rule of JSON that follows ``schema``."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _JSON_STYLE}
    return f"%json {json.dumps(schema)}"


def regex_rule(pattern: str) -> str:
    """The rule of text that matches ``pattern`` as a whole. Line ends are spelt out, as Lark's patterns have none."""
    escaped = "".join("\\/" if part == "/" else part for part in _parts(pattern))
    return f"/{escaped.replace(chr(10), chr(92) + 'n').replace(chr(13), chr(92) + 'r')}/"


def _parts(pattern: str) -> list[str]:
    """The characters of a pattern, each with the backslash before it."""
    parts: list[str] = []
    rest = iter(pattern)
    for character in rest:
        parts.append(character + next(rest, "") if character == "\\" else character)
    return parts


def choice_rule(choices: Sequence[str]) -> str:
    """The rule of text that is one of ``choices``."""
    return " | ".join(json.dumps(choice) for choice in choices)


def grammar_source(format_: AnswerFormat, tools: Sequence[dict[str, Any]]) -> str:
    """The grammar of an answer that may call ``tools``; empty if any text will do.

    The arguments of strict tools follow their schemas. Those of others do if calls have a format for another reason,
    as far as their keywords are known.
    """
    if format_.grammar:
        return format_.grammar
    functions = [tool["function"] for tool in tools]
    called = [function for function in functions if format_.tool in ("", function["name"])]
    is_any_strict = any(function.get("strict") for function in functions)
    if not called or not (format_.needs_call or format_.content or not format_.allows_several_calls or is_any_strict):
        return f"start: {format_.content}" if format_.content else ""
    numbered = list(enumerate(called))
    return "\n".join(
        [
            f"start: {_start(format_)}",
            'calls: call ("\\n"? call)*',
            'call: "<tool_call>" body',
            f'body: "\\n"? ({" | ".join(f"call_{number}" for number, _ in numbered)}) "\\n"? "</tool_call>"',
            *(_call_rule(number, function) for number, function in numbered),
            "text[lazy]: /(.|\\n)*<tool_call>/",
            "FREE: /(.|\\n)*/",
        ]
    )


def _start(format_: AnswerFormat) -> str:
    several = format_.allows_several_calls
    if format_.needs_call:
        return "calls" if several else "call"
    if format_.content:
        return f"content | {'calls' if several else 'call'}\ncontent: {format_.content}"
    return "FREE | (text body)+ FREE" if several else "FREE | text body"


def _call_rule(number: int, function: dict[str, Any]) -> str:
    arguments = {**(function.get("parameters") or {"type": "object"}), "x-guidance": _JSON_STYLE}
    if not function.get("strict"):
        arguments["x-guidance"] = {**_JSON_STYLE, "lenient": True}
    opening = f'/\\{{ ?"name": ?"{function["name"]}", ?"arguments": ?/'
    return f"call_{number}: {opening} %json {json.dumps(arguments)} /[ \\n]?\\}}/"
