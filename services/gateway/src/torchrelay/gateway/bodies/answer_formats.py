"""The format that a request asks of its answer: OpenAI's ``response_format``, and the fields of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.strict_schemas import check_strict
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat, choice_rule, json_rule, regex_rule

MAX_CHOICES: Final = 1024
_ANY_OBJECT: Final = {"type": "object"}


class JsonSchemaFormat(msgspec.Struct):
    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None  # of a JSON object, in the format of other servers


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's, which once were fields of their own: ``guided_json`` and so on. Any other field changes the answer."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def answer_format(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, guided: StructuredOutputs
) -> AnswerFormat | None:
    """The format; None if any text will do. Raises ``InvalidRequest`` naming the field at fault."""
    asked = [*of_response_format(response_format)]
    if structured is not None:
        asked += _of_structured(structured, "structured_outputs", "structured_outputs.")
    asked += _of_structured(guided, "", "guided_")
    if len(asked) > 1:
        names = " and ".join(format_.field for format_ in asked)
        raise InvalidRequest(f"an answer has one format: {names} are given together", field=asked[1].field)
    return asked[0] if asked else None


def of_response_format(asked: ResponseFormat | None, field: str = "response_format") -> Iterator[AnswerFormat]:
    """The format, unless any text will do; ``field`` names it in errors. Raises ``InvalidRequest``."""
    match asked:
        case None | ResponseFormat(type="text"):
            return
        case ResponseFormat(type="json_object", schema=schema):
            yield AnswerFormat(content=schema_rule(_ANY_OBJECT if schema is None else schema, field), field=field)
        case ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat() as declared):
            schema = _ANY_OBJECT if declared.schema is None else declared.schema
            if declared.strict:
                check_strict(schema, f"{field}: schema", field)
            yield AnswerFormat(content=schema_rule(schema, field), field=field)
        case ResponseFormat(type="json_schema"):
            raise InvalidRequest(f"{field}: the schema is missing", field=field)
        case _:
            message = f"{field}.type must be text, json_object or json_schema, not {asked.type[:40]!r}"
            raise InvalidRequest(message, field=field)


def _of_structured(asked: StructuredOutputs, field: str, prefix: str) -> Iterator[AnswerFormat]:
    """The formats of all fields that are given. ``field`` names all of them in errors, ``prefix`` begins each name."""
    if asked.json not in (None, False):
        name = f"{prefix}json"
        yield AnswerFormat(content=schema_rule(_schema_of(asked.json, name), field or name), field=field or name)
    if asked.json_object:
        yield AnswerFormat(content=json_rule(_ANY_OBJECT), field=field or f"{prefix}json_object")
    if asked.regex is not None:
        if not asked.regex:
            raise InvalidRequest(f"{prefix}regex must not be empty", field=field or f"{prefix}regex")
        yield AnswerFormat(content=regex_rule(asked.regex), field=field or f"{prefix}regex")
    if asked.choice is not None:
        name = f"{prefix}choice"
        if not 0 < len(asked.choice) <= MAX_CHOICES or not all(asked.choice):
            message = f"{name} must have 1 to {MAX_CHOICES} texts, none of them empty"
            raise InvalidRequest(message, field=field or name)
        yield AnswerFormat(content=choice_rule(asked.choice), field=field or name)
    if asked.grammar is not None:
        name = f"{prefix}grammar"
        if not asked.grammar.strip():
            raise InvalidRequest(f"{name} must not be empty", field=field or name)
        yield AnswerFormat(grammar=asked.grammar, field=field or name)


def schema_rule(schema: Any, field: str) -> str:
    """The rule of JSON that follows ``schema``. Raises ``InvalidRequest`` if it is nested too deeply."""
    try:
        return json_rule(schema)
    except RecursionError:
        raise InvalidRequest(f"{field}: the schema is nested too deeply", field=field) from None


def _schema_of(given: Any, name: str) -> Any:
    """A schema, which vLLM also takes as a JSON string."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{name} is no JSON: {error}", field=name.partition(".")[0]) from error
    return given
