"""Faults that Pydantic finds in what people gave, in plain words: what it must be, and what was given. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

WHOLE, NUMBER, TEXT, BOOLEAN, LIST, OBJECT = (
    "a whole number",
    "a number",
    "a text",
    "true or false",
    "a list",
    "an object",
)
_KINDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), BOOLEAN),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), OBJECT),
    "string_type": TEXT,
    "list_type": LIST,
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "above {gt}",
    "less_than": "below {lt}",
}
_BOUNDS = {
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "at least {min_length} entries long",
    "too_long": "at most {max_length} entries long",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
_MAX_SHOWN = 40


def describe_error(field: str, fault: Mapping[str, Any]) -> str:
    """``max_tokens must be a whole number, not 'ten'``; without a field's name what follows it.

    ``fault``: one of ``ValidationError.errors()``.
    """
    if words := _clause(fault):
        return f"{field} {words}".lstrip()
    others = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")  # a sentence of its own
    return f"{field}: {others}" if field else others


def _clause(fault: Mapping[str, Any]) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not known"
    if kind in ("too_short", "string_too_short") and context["min_length"] == 1:
        return "must not be empty"
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind].format(**context)}, not {_truncate(str(fault['input']))}"
    wanted = _KINDS.get(kind) or (_BOUNDS[kind].format(**context) if kind in _BOUNDS else "")
    return f"must be {wanted}, not {quote_value(fault['input'])}" if wanted else ""


def quote_value(given: Any) -> str:
    """A value in so many letters at most; of what holds others just what it is."""
    if isinstance(given, str):
        return repr(_truncate(given))
    if isinstance(given, list | tuple):
        return LIST if given else "an empty list"
    return _truncate(json.dumps(given)) if given is None or isinstance(given, bool | int | float) else OBJECT


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
