"""OpenAI's rules for the schemas of strict answers and tools. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from torchrelay.common.errors import InvalidRequest

MAX_PROPERTIES: Final = 5000  # of all objects together
MAX_DEPTH: Final = 10  # of nested objects
_MAX_NAME_CHARS: Final = 80
_UNSUPPORTED: Final = ("allOf", "not", "dependentRequired", "dependentSchemas", "if", "then", "else", "oneOf")


def check_strict(schema: Any, where: str, field: str) -> None:
    """Raises ``InvalidRequest`` with the path of the part that breaks a rule, which begins with ``where``.

    The root is an object; every object lists all its properties as required and forbids others; at most
    ``MAX_PROPERTIES``, nested at most ``MAX_DEPTH`` deep.
    """
    if not isinstance(schema, dict) or schema.get("type") != "object" or "anyOf" in schema:
        raise InvalidRequest(f"{where}: a strict schema must be an object at its root, not anyOf", field=field)
    num_properties = 0
    for path, part, depth in _parts(schema, where):
        if fault := _fault(part):
            raise InvalidRequest(f"{path}: {fault}", field=field)
        if not _is_object(part):
            continue
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{path}: objects are nested deeper than {MAX_DEPTH} levels", field=field)
        num_properties += len(part.get("properties") or ())
        if num_properties > MAX_PROPERTIES:
            raise InvalidRequest(f"{where} has more than {MAX_PROPERTIES:,} properties", field=field)


def _fault(part: dict[str, Any]) -> str:
    """The rule that a part breaks; empty if it breaks none."""
    for name in _UNSUPPORTED:
        if name in part:
            return f"a strict schema cannot have {name!r}"
    if not _is_object(part):
        return ""
    properties, required = part.get("properties") or {}, part.get("required")
    if not _is(properties):
        return "'properties' must be an object"
    if part.get("additionalProperties") is not False:
        return "an object of a strict schema must have 'additionalProperties': false"
    listed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    missing = next((name for name in properties if name not in listed), None)
    if missing is None:
        return ""
    return (
        f"'required' of a strict schema must list every property; it lacks {missing[:80]!r} (make it nullable if it may"
        " be absent)"
    )


def _is_object(part: dict[str, Any]) -> bool:
    return part.get("type") == "object" or "properties" in part


class _Path:
    """The path of a part, written out only for an error: those of all parts may take the square of the memory."""

    __slots__ = ("_name", "_parent")

    def __init__(self, parent: _Path | None, name: str) -> None:
        self._parent, self._name = parent, name

    def __str__(self) -> str:
        names: list[str] = []
        path: _Path | None = self
        while path is not None:
            names.append(path._name[:_MAX_NAME_CHARS])
            path = path._parent
        return "".join(reversed(names))


def _parts(schema: dict[str, Any], where: str) -> Iterator[tuple[_Path, dict[str, Any], int]]:
    """(path, schema, depth) of the schema and of all within it."""
    pending = [(_Path(None, where), schema, 1)]
    while pending:
        path, part, depth = pending.pop()
        yield path, part, depth
        deeper = depth + (part.get("type") == "object")
        for name in ("properties", "$defs", "definitions"):
            children = part.get(name)
            if isinstance(children, dict):
                within = _Path(path, f".{name}.")
                pending += [(_Path(within, key), each, deeper) for key, each in children.items() if _is(each)]
        if _is(items := part.get("items")):
            pending.append((_Path(path, ".items"), items, deeper))
        variants = part.get("anyOf")
        if isinstance(variants, list):
            pending += [(_Path(path, f".anyOf[{i}]"), each, depth) for i, each in enumerate(variants) if _is(each)]


def _is(schema: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(schema, dict)
