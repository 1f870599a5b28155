"""Pydantic's validation errors as sentences: what a value must be, and what was given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

INTEGER, NUMBER, STRING, BOOLEAN = "an integer", "a number", "a string", "true or false"
LIST, OBJECT = "a list", "an object"
_KINDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), INTEGER),
    **dict.fromkeys(("float_type", "float_parsing"), NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), BOOLEAN),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), OBJECT),
    "string_type": STRING,
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
_MAX_CHARS = 40


def describe_error(field: str, fault: Mapping[str, Any]) -> str:
    """``max_tokens must be an integer, not 'ten'``; without ``field`` only what follows it.

    ``fault``: one of ``ValidationError.errors()``.
    """
    if words := _clause(fault):
        return f"{field} {words}".lstrip()
    others = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")  # a complete sentence
    return f"{field}: {others}" if field else others


def _clause(fault: Mapping[str, Any]) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not a recognized field"
    if kind in ("too_short", "string_too_short") and context["min_length"] == 1:
        return "must not be empty"
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind].format(**context)}, not {_truncate(str(fault['input']))}"
    wanted = _KINDS.get(kind) or (_BOUNDS[kind].format(**context) if kind in _BOUNDS else "")
    return f"must be {wanted}, not {quote_value(fault['input'])}" if wanted else ""


def quote_value(given: Any) -> str:
    """A short form of a value; of containers only their kind."""
    if isinstance(given, str):
        return repr(_truncate(given))
    if isinstance(given, list | tuple):
        return LIST if given else "an empty list"
    return _truncate(json.dumps(given)) if given is None or isinstance(given, bool | int | float) else OBJECT


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
