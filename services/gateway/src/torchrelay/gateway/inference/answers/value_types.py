"""The JSON types that a schema allows for a parameter. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ALL_TYPES: Final = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_MAX_READ: Final = 2000  # schemas, values and steps of references for a parameter: milliseconds
_MAX_REFERENCE_CHARS: Final = 1000


def allowed_types(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types of the values of ``key`` that the schema ``parameters`` allows; ``ALL_TYPES`` if it says nothing."""
    return _Schemas(parameters).parameter(key)


class _Schemas:
    """A schema, whose references it resolves."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_read = 0
        self._of_reference: dict[str, frozenset[str]] = {}

    def parameter(self, key: str) -> frozenset[str]:
        schema: Any = self._root
        while isinstance(schema, dict) and "$ref" in schema and "properties" not in schema and self._may_read():
            schema = self._target(schema["$ref"])
        if not isinstance(schema, dict):
            return ALL_TYPES
        properties = schema.get("properties")
        if isinstance(properties, dict) and key in properties:
            return self._types(properties[key])
        return self._types(schema.get("additionalProperties"))

    def _types(self, schema: Any) -> frozenset[str]:
        if not isinstance(schema, dict) or not self._may_read():
            return ALL_TYPES
        allowed = ALL_TYPES
        if "type" in schema:
            declared = schema["type"]
            allowed &= _named(declared if isinstance(declared, list) else [declared])
        if isinstance(schema.get("enum"), list):
            allowed &= self._of_values(schema["enum"])
        if "const" in schema:
            allowed &= value_types(schema["const"])
        if "$ref" in schema:
            allowed &= self._referenced(schema["$ref"])
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                allowed &= frozenset().union(*map(self._types, schema[keyword]))
        if isinstance(schema.get("allOf"), list):
            allowed = allowed.intersection(*map(self._types, schema["allOf"]))
        return allowed or ALL_TYPES

    def _of_values(self, values: list[Any]) -> frozenset[str]:
        return frozenset().union(*map(value_types, values)) if self._may_read(len(values)) else ALL_TYPES

    def _referenced(self, reference: Any) -> frozenset[str]:
        if not isinstance(reference, str) or len(reference) > _MAX_REFERENCE_CHARS:
            return ALL_TYPES
        if reference not in self._of_reference:
            self._of_reference[reference] = ALL_TYPES  # of a reference within what it refers to
            self._of_reference[reference] = self._types(self._target(reference))
        return self._of_reference[reference]

    def _may_read(self, count: int = 1) -> bool:
        self._num_read += count
        return self._num_read <= _MAX_READ

    def _target(self, reference: Any) -> Any:
        """The schema that ``reference`` points to within the root; None if it is elsewhere."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        if len(reference) > _MAX_REFERENCE_CHARS or not self._may_read(reference.count("/")):
            return None
        target: Any = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        return target


def value_types(value: Any) -> frozenset[str]:
    """The types that the JSON value ``value`` has."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return frozenset({"string"})
        case int() | float():
            return frozenset({"number", "integer"} if value == value // 1 else {"number"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _named(declared: list[Any]) -> frozenset[str]:
    names = frozenset(name for name in declared if isinstance(name, str)) & ALL_TYPES
    return names | {"integer"} if "number" in names else names or ALL_TYPES
