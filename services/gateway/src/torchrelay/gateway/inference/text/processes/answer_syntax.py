"""The syntax of a model's answers, derived from its chat template or declared by its tokenizer's ``response_template``.

Only text processes import this module, like that of the templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from torchrelay.gateway.inference.answers.syntax import (
    COMMAND,
    HERMES,
    LLAMA,
    MISTRAL,
    NEMOTRON,
    PHI,
    QWEN_CODER,
    SEED,
    AnswerSyntax,
    CallSyntax,
)

# What a template that asks for calls contains, most specific first.
_CALLS: Final[tuple[tuple[tuple[str, ...], CallSyntax | None], ...]] = (
    (("<arg_key>",), None),  # GLM's, which are neither JSON nor Qwen3-Coder's tags
    ((SEED.opening, "<function="), SEED),
    ((QWEN_CODER.opening, "<function="), QWEN_CODER),
    *(((syntax.opening,), syntax) for syntax in (HERMES, MISTRAL, PHI, NEMOTRON, COMMAND, LLAMA)),
    (('{"name": function name, "parameters"',), LLAMA),
)
_THOUGHTS: Final = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")


_MAX_KEY_CHARS: Final = 64
_Marker = Annotated[str, msgspec.Meta(max_length=64)]  # the parser looks for it at each character of an answer


class _Field(msgspec.Struct):
    """A field of a response template, as far as it is supported: literal markers, text and plain JSON."""

    open: _Marker
    close: _Marker = ""
    content: str = "text"
    content_args: dict[str, Any] | None = None
    transform: Any = None
    close_pattern: None = None


def syntax_of(template: str) -> AnswerSyntax:
    """The syntax that a chat template shows to the model."""
    calls = next((syntax for texts, syntax in _CALLS if all(text in template for text in texts)), None)
    return AnswerSyntax(calls, next((pair for pair in _THOUGHTS if pair[1] in template), None))


def declared_syntax(response_template: Any) -> AnswerSyntax:
    """The syntax of a response template, as transformers has them, whose markers are literal; other fields are left
    out, as patterns are code.
    """
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    if not isinstance(fields, dict):
        return AnswerSyntax()
    thoughts = next((field for name in _REASONING_FIELDS if (field := _field(fields, name, "text"))), None)
    calls = _field(fields, "tool_calls", "json")
    keys = None if calls is None else _keys(calls.transform)
    return AnswerSyntax(
        None if calls is None or keys is None else CallSyntax("json", calls.open, calls.close, keys[0], (keys[1],)),
        (thoughts.open, thoughts.close) if thoughts is not None and thoughts.close else None,
    )


def merged(known: AnswerSyntax, declared: AnswerSyntax) -> AnswerSyntax:
    """The ``known`` syntax, completed by the declared one."""
    return AnswerSyntax(known.calls or declared.calls, known.thoughts or declared.thoughts)


def _field(fields: Mapping[str, Any], name: str, content: str) -> _Field | None:
    try:
        field = msgspec.convert(fields[name], _Field)
    except (KeyError, msgspec.ValidationError):
        return None
    field.open, field.close = field.open.strip(), field.close.strip()  # the parser skips white space around markers
    return field if field.open and field.content == content and not field.content_args else None


def _keys(transform: Any) -> tuple[str, str] | None:
    """The keys of name and arguments in the JSON of a call; None if it is transformed in another way."""
    match transform:
        case {"function": "{content}"}:
            return "name", "arguments"
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            keys = tuple(text[1:-1] for text in (name, arguments) if text[:1] == "{" and text[-1:] == "}")
            if len(keys) != 2 or max(map(len, keys)) > _MAX_KEY_CHARS:
                return None
            return keys[0].removeprefix("content."), keys[1].removeprefix("content.")
    return None
