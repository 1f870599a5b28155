"""The format that an answer must follow. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

# JSON as models write it, compact or indented; not more, because weak models would write space to the end.
JSON_STYLE: Final = {"whitespace_pattern": r"\x20|\n[\x20\x09]{0,20}"}


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The wishes of a caller for an answer. At most one of ``content`` and ``grammar`` is set."""

    content: str = ""  # the right side of a Lark rule for the text; empty: any text
    grammar: str = ""  # a whole grammar, in Lark or GBNF
    field: str = "response_format"  # of the request, for errors
    tool: str = ""  # that is called; empty: any of the tools
    needs_call: bool = False  # at least one tool is called
    allows_several_calls: bool = True


def json_rule(schema: Any) -> str:
    """The rule of JSON that follows ``schema``."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": JSON_STYLE}
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
