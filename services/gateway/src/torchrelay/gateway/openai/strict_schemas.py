"""OpenAI's rules for the schemas of strict answers and tools. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from torchrelay.common.errors import InvalidRequest

MAX_PROPERTIES: Final = 5000  # of all objects together
MAX_DEPTH: Final = 10  # of nested objects
_UNSUPPORTED: Final = ("allOf", "not", "dependentRequired", "dependentSchemas", "if", "then", "else", "oneOf")


def check_strict(schema: Any, where: str, field: str) -> None:
    """Raises ``InvalidRequest`` with the path of the part that breaks a rule, which begins with ``where``.

    The root is an object; every object lists all its properties as required and forbids others; at most
    ``MAX_PROPERTIES``, nested at most ``MAX_DEPTH`` deep.
    """
    if not isinstance(schema, dict) or schema.get("type") != "object" or "anyOf" in schema:
        raise InvalidRequest(f"{where}: a strict schema must be an object at its root, not anyOf", field=field)
    num_properties = 0
    for path, part, depth in _parts(schema, where, 1):
        for name in _UNSUPPORTED:
            if name in part:
                raise InvalidRequest(f"{path}: a strict schema cannot have {name!r}", field=field)
        if part.get("type") != "object" and "properties" not in part:
            continue
        names = part.get("properties") or {}
        num_properties += len(names)
        if part.get("additionalProperties") is not False:
            message = f"{path}: an object of a strict schema must have 'additionalProperties': false"
            raise InvalidRequest(message, field=field)
        required = part.get("required")
        if missing := [name for name in names if not isinstance(required, list) or name not in required]:
            message = (
                f"{path}: 'required' of a strict schema must list every property; it lacks {missing[0][:80]!r} (make"
                " it nullable if it may be absent)"
            )
            raise InvalidRequest(message, field=field)
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{path}: objects are nested deeper than {MAX_DEPTH} levels", field=field)
    if num_properties > MAX_PROPERTIES:
        message = f"{where} has {num_properties:,} properties; at most {MAX_PROPERTIES:,} are allowed"
        raise InvalidRequest(message, field=field)


def _parts(schema: dict[str, Any], path: str, depth: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(path, schema, depth) of the schema and of all within it."""
    pending = [(path, schema, depth)]
    while pending:
        path, part, depth = pending.pop()
        yield path, part, depth
        deeper = depth + (part.get("type") == "object")
        for name in ("properties", "$defs", "definitions"):
            children = part.get(name)
            if isinstance(children, dict):
                pending += [(f"{path}.{name}.{key[:80]}", each, deeper) for key, each in children.items() if _is(each)]
        if _is(items := part.get("items")):
            pending.append((f"{path}.items", items, deeper))
        variants = part.get("anyOf")
        if isinstance(variants, list):
            pending += [(f"{path}.anyOf[{i}]", each, depth) for i, each in enumerate(variants) if _is(each)]


def _is(schema: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(schema, dict)
