"""Formats of answers in requests, and the grammar that workers get."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat, choice_rule, json_rule, regex_rule
from torchrelay.gateway.openai.answer_formats import JsonSchemaFormat, ResponseFormat, StructuredOutputs, answer_format
from torchrelay.gateway.openai.strict_schemas import check_strict

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True}
GUIDED_JSON = AnswerFormat(content=json_rule(SCHEMA), field="guided_json")
OBJECT = json_rule({"type": "object"})


def format_of(**fields: Any) -> AnswerFormat | None:
    given = msgspec.convert(fields.get("response_format"), ResponseFormat | None)
    structured = msgspec.convert(fields.get("structured_outputs"), StructuredOutputs | None)
    guided = {name.removeprefix("guided_"): value for name, value in fields.items() if name.startswith("guided_")}
    return answer_format(given, structured, msgspec.convert(guided, StructuredOutputs))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, AnswerFormat(content=OBJECT)),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, AnswerFormat(content=json_rule(SCHEMA))),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AnswerFormat(content=json_rule(SCHEMA))),
        ({"guided_json": SCHEMA}, GUIDED_JSON),
        ({"guided_json": msgspec.json.encode(SCHEMA).decode()}, GUIDED_JSON),
        ({"guided_choice": ["a", "b"]}, AnswerFormat(content=choice_rule(["a", "b"]), field="guided_choice")),
        ({"guided_grammar": "root ::= 'a'"}, AnswerFormat(grammar="root ::= 'a'", field="guided_grammar")),
        ({"structured_outputs": {"regex": "a/b"}}, AnswerFormat(content=regex_rule("a/b"), field="structured_outputs")),
        ({"structured_outputs": {"json_object": True}}, AnswerFormat(content=OBJECT, field="structured_outputs")),
    ],
)
def test_format_of_fields(fields: dict[str, Any], expected: AnswerFormat | None) -> None:
    assert format_of(**fields) == expected


def test_schema_that_is_nested_too_deeply_is_refused() -> None:
    for depth in (1000, 100_000):
        with pytest.raises(InvalidRequest) as caught:
            format_of(guided_json='{"a": ' * depth + "{}" + "}" * depth)
        assert caught.value.field == "guided_json"
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="response_format: the schema is nested too deeply"):
        answer_format(ResponseFormat("json_schema", JsonSchemaFormat("n", deep)), None, StructuredOutputs())


def changed(**changes: Any) -> dict[str, Any]:
    return {**SCHEMA, **changes}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "array"}, "must be an object at its root"),
        ({"anyOf": [SCHEMA]}, "must be an object at its root"),
        (changed(additionalProperties=True), "s: an object of a strict schema must have 'additionalProperties': false"),
        (changed(required=[]), "it lacks 'a'"),
        (changed(properties={"a": {"allOf": []}}), "s.properties.a: a strict schema cannot have 'allOf'"),
        (
            changed(properties={"a": {"type": "array", "items": changed(required=None)}}),
            "s.properties.a.items: 'required'",
        ),
        (changed(properties={"a": {"anyOf": [changed(required=[])]}}), "s.properties.a.anyOf[0]: 'required'"),
        (changed(properties=5), "s: 'properties' must be an object"),
        (changed(properties=[5]), "s: 'properties' must be an object"),
        (changed(**{"$defs": {"d": {"type": "object"}}}), "s.$defs.d: an object"),
    ],
)
def test_strict_schema_keeps_the_rules(schema: dict[str, Any], why: str) -> None:
    check_strict(SCHEMA, "s", "f")
    with pytest.raises(InvalidRequest) as caught:
        check_strict(schema, "s", "f")
    assert why in caught.value.message and caught.value.field == "f"


def test_strict_schema_is_bounded() -> None:
    deep: dict[str, Any] = SCHEMA
    for _ in range(9):
        deep = changed(properties={"a": deep})
    check_strict(deep, "s", "f")
    with pytest.raises(InvalidRequest, match="deeper than 10"):
        check_strict(changed(properties={"a": deep}), "s", "f")
    names = [f"p{number}" for number in range(5001)]
    with pytest.raises(InvalidRequest, match="more than 5,000 properties"):
        check_strict(changed(properties={name: {} for name in names}, required=names), "s", "f")


def test_work_on_a_strict_schema_is_linear_in_its_size() -> None:
    """The square of the names would take minutes, and paths as texts 300 MB."""
    names = [f"p{number}" for number in range(100_000)]
    wide = changed(properties={name: {} for name in names}, required=names)
    with pytest.raises(InvalidRequest, match="more than 5,000 properties"):
        check_strict(wide, "s", "f")
    deep: dict[str, Any] = {"$defs": {name: {} for name in names[:20_000]}}
    for _ in range(200):
        deep = {"$defs": {"d" * 80: deep}}
    tracemalloc.start()
    check_strict({**SCHEMA, **deep}, "s", "f")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 << 20


@pytest.mark.parametrize("prompt", ["hi", [1, 2]], ids=["text", "token ids"])
async def test_workers_get_the_grammar(rig: TokenPathRig, prompt: str | list[int]) -> None:
    body = {"model": "echo", "prompt": prompt, "max_tokens": 2}
    for fields, grammar in (({}, ""), ({"guided_choice": ["yes", "no"]}, 'start: answer\nanswer: "yes" | "no"')):
        for worker in rig.workers:
            worker.starts.clear()
        assert (await rig.http.post("/v1/completions", json={**body, **fields})).status_code == 200
        starts = [start for worker in rig.workers for _, start in worker.starts]
        assert starts and {start.sampling.grammar for start in starts} == {grammar}


@pytest.mark.parametrize(("num_rules", "status"), [(300, 200), (1500, 400)])
async def test_grammar_that_could_overflow_the_stack_of_a_worker_is_refused(
    rig: TokenPathRig, num_rules: int, status: int
) -> None:
    rules = [f"r{number}: r{number + 1}" for number in range(num_rules)]
    body = {"model": "echo", "prompt": "hi", "max_tokens": 2}
    grammar = "\n".join(["start: r0", *rules, f'r{num_rules}: "a"'])
    reply = await rig.http.post("/v1/completions", json={**body, "guided_grammar": grammar})
    assert reply.status_code == status
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
