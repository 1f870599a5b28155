"""OpenAI's rules for the schemas of strict answers and tools. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from torchrelay.common.errors import InvalidRequest

MAX_PROPERTIES: Final = 5000  # of all objects together
MAX_DEPTH: Final = 10  # of nested objects
MAX_PARTS: Final = 20_000  # of the schemas of a request: the schemas within them, which take 0.1 s
_MAX_NAME_CHARS: Final = 80
_NAMED: Final = ("properties", "$defs", "definitions")  # keywords with schemas by name
_UNSUPPORTED: Final = ("allOf", "not", "dependentRequired", "dependentSchemas", "if", "then", "else", "oneOf")


def check_strict(schema: Any, where: str, field: str, num_parts: int = 0) -> int:
    """Raises ``InvalidRequest`` with the path of the part that breaks a rule, which begins with ``where``.

    The root is an object; every object lists all its properties as required and forbids others; at most
    ``MAX_PROPERTIES``, nested at most ``MAX_DEPTH`` deep, of at most ``MAX_PARTS``. ``num_parts`` is the number of
    parts in the request's earlier schemas. Returns that number plus this schema's.
    """
    if not isinstance(schema, dict) or schema.get("type") != "object" or "anyOf" in schema:
        raise InvalidRequest(f"{where}: a strict schema must be an object at its root, not anyOf", field=field)
    num_properties = 0
    pending = [(_Path(None, where), schema, 1)]
    while pending:
        path, part, depth = pending.pop()
        num_parts += _num_children(part)
        if num_parts > MAX_PARTS or len(_list(part.get("required"))) > MAX_PARTS:
            message = f"{where} and the strict schemas before it have more than {MAX_PARTS:,} parts"
            raise InvalidRequest(message, field=field)
        pending += _children(path, part, depth)
        if fault := _fault(part):
            raise InvalidRequest(f"{path}: {fault}", field=field)
        if not _is_object(part):
            continue
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{path}: objects are nested deeper than {MAX_DEPTH} levels", field=field)
        num_properties += len(part.get("properties") or ())
        if num_properties > MAX_PROPERTIES:
            raise InvalidRequest(f"{where} has more than {MAX_PROPERTIES:,} properties", field=field)
    return num_parts


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


def _num_children(part: dict[str, Any]) -> int:
    """At least the number of schemas directly within a part."""
    named = sum(len(entries) for name in _NAMED if _is(entries := part.get(name)))
    return named + len(_list(part.get("anyOf"))) + ("items" in part)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _children(path: _Path, part: dict[str, Any], depth: int) -> Iterator[tuple[_Path, dict[str, Any], int]]:
    """(path, schema, depth) of the schemas directly within a part."""
    deeper = depth + (part.get("type") == "object")
    for name in _NAMED:
        children = part.get(name)
        if isinstance(children, dict):
            within = _Path(path, f".{name}.")
            yield from ((_Path(within, key), each, deeper) for key, each in children.items() if _is(each))
    if _is(items := part.get("items")):
        yield _Path(path, ".items"), items, deeper
    variants = part.get("anyOf")
    if isinstance(variants, list):
        yield from ((_Path(path, f".anyOf[{i}]"), each, depth) for i, each in enumerate(variants) if _is(each))


def _is(schema: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(schema, dict)
