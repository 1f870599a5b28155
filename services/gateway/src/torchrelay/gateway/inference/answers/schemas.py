"""JSON schemas as llguidance takes them, and its refusals as sentences. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

# The formats that bind a grammar; JSON Schema allows any others, as annotations.
_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_VACUOUS: Final[dict[str, tuple[Any, ...]]] = {  # values with which a keyword that grammars do not know allows all
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
_SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS: Final = ("items", "prefixItems", "additionalProperties", "additionalItems", "anyOf", "oneOf", "allOf")
_COMPILER: Final = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
_KEYS: Final = re.compile(r"^Unimplemented keys: \[(.*)\]$")


def binding_schema(schema: Any) -> Any:
    """The schema without what only annotates: formats that are not known, keywords whose value allows everything."""
    if isinstance(schema, list):
        return [binding_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bound: dict[str, Any] = {}
    for key, value in schema.items():
        if (key == "format" and isinstance(value, str) and value not in _FORMATS) or value in _VACUOUS.get(key, ()):
            continue
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            bound[key] = {name: binding_schema(each) for name, each in value.items()}
        else:
            bound[key] = binding_schema(value) if key in _SCHEMAS else value
    return bound


def schema_fault(error: str) -> str:
    """A sentence for an ``error`` of llguidance about a grammar that the platform wrote."""
    fault = _COMPILER.sub("", error)
    if keys := _KEYS.match(fault):
        names = keys[1].replace('"', "")
        return f"the schema has {names}, which no grammar can hold; leave it out and check the answer"
    if fault.startswith("oneOf "):
        return "the schema has a oneOf whose alternatives may overlap, which no grammar can hold; write anyOf"
    return fault
