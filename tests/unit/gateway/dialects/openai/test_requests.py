"""OpenAI request bodies: accepted, ignored and refused fields, formats of answers, and the grammar that workers get."""

from __future__ import annotations

import string
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cpu_steps import short_step
from tests.unit.gateway.dialects.test_params import DECODED, params_of
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.answer_formats import JsonSchemaFormat, ResponseFormat, StructuredOutputs, answer_format
from torchrelay.gateway.bodies.strict_schemas import check_strict
from torchrelay.gateway.bodies.tools import declared_tools
from torchrelay.gateway.bodies.typo_hints import is_one_edit_away, typo_hint
from torchrelay.gateway.bodies.unusable_text import check_text
from torchrelay.gateway.dialects.responses.tools import tools_of
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat, choice_rule, json_rule, regex_rule


def test_answer_may_continue_the_last_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    given: dict[str, Any] = {"messages": messages, "continue_final_message": True, "response_format": {"type": "text"}}
    assert (
        params_of("chat", **given).continues_last
        and params_of("chat", **given, add_generation_prompt=False).continues_last
    )
    assert not params_of("chat", messages=messages).continues_last


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("p", "p", None), (["p"], "p", None), ([1, 2], None, [1, 2]), ([[1, 2]], None, [1, 2]), ([], None, [])],
)
def test_prompt_forms_are_decoded(prompt: object, text: str | None, token_ids: list[int] | None) -> None:
    params = params_of("completions", prompt=prompt)
    assert (params.text, params.token_ids) == (text, token_ids)


def test_message_forms_are_decoded() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None, "reasoning": "Hm."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "tool", "content": []},
    ]
    params = params_of("chat", messages=messages, max_tokens=3, max_completion_tokens=4)
    answer = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert params.messages == (
        {"role": "system", "content": "a\nb", "name": "n"},
        answer,
        {"role": "user", "content": "See\n[image left out: this model reads text only]"},
        {"role": "assistant", "content": "No."},
        {"role": "tool", "content": ""},
    )
    assert params.left_out == ("image",)
    assert (params.max_tokens, params.max_tokens_field) == (4, "max_completion_tokens")


def test_large_bodies_are_refused_without_work_on_each_of_their_numbers() -> None:
    """Decoding occupies the event loop, so all other requests wait for it."""
    zeros = b",".join([b"0"] * 100_000)
    wrong = [
        b'{"model": "m", "prompt": [%s], "temperature": NaN}' % zeros,
        b'{"model": "m", "prompt": "p", "logit_bias": {%s}}' % b",".join(b'"%d":1' % i for i in range(20_000)),
        b'{"model": "m", "prompt": [%s, "a"]}' % zeros,
        b'{"model": "m", "prompt": [%s], "n": 0.0}' % zeros.replace(b"0", b"0.0"),
    ]
    for body in wrong:
        called: list[str] = []

        def note(frame: FrameType, event: str, argument: object, called: list[str] = called) -> None:
            called.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            with pytest.raises(InvalidRequest):
                DECODED["completions"](body)
        finally:
            sys.setprofile(None)
        assert len(called) < 1000 and "raw_decode" not in called, "the slower decoder is for small bodies"


KNOWN = ("model", "messages", "max_tokens", "n", "stop", "top_p")


def test_name_one_edit_away_is_hinted() -> None:
    for name in ("max_token", "max_tokenss", "max_tokems", "max_tokesn", "ax_tokens", "mx_tokens"):
        assert typo_hint(["model", name], KNOWN) == (name, "max_tokens")
    for names in (
        ["model", "user", "store", "metadata", "min_tokens", "k", "m"],
        ["model", "models"],  # an extension beside the field it resembles
        ["max_tokens", "max_token"],
        [*KNOWN],
        [],
        [*(f"name-{number}" for number in range(1000)), "max_token"],  # more names than are examined
    ):
        assert typo_hint(names, KNOWN) is None


@given(st.text(string.ascii_lowercase, max_size=8), st.integers(0, 8), st.sampled_from(string.ascii_lowercase))
def test_edit_distance_is_symmetric(name: str, place: int, letter: str) -> None:
    place = min(place, len(name))
    longer = name[:place] + letter + name[place:]
    assert is_one_edit_away(name, longer) and is_one_edit_away(longer, name)
    other = name[:place] + letter + name[place + 1 :]
    assert is_one_edit_away(name, other) == (name != other)
    assert not is_one_edit_away(name, name + "xy") and not is_one_edit_away(name, name)


def test_field_with_unusable_text_is_named() -> None:
    for body, field in (
        (r'{"name": "a\ud800"}', "name"),
        (r'{"files": [{"path": "b"}, {"path": "c\uDFFF"}]}', "files.1.path"),
        (r'{"nested": {"deep": "\u0000"}}', "nested.deep"),
        (r'{"k\u0000": 1}', None),
        (r'["\ud83d"]', "0"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            check_text(body.encode())
        assert refused.value.field == field
        for usable in (r'{"a": "😀 \ud83d\ude00 \\u0000"}', '{"a": "é"}', r'{"a": "\u0000', "[]"):
            check_text(usable.encode())


@pytest.mark.parametrize("part", [b'"",', rb'"\\",', rb'"\ud83d\ude00",', b"[[[[]]]],", b'{"":""},'])
@pytest.mark.parametrize("depth", [1, 900])
def test_search_for_unusable_text_is_linear(part: bytes, depth: int) -> None:
    """64 KiB, the most that is checked on the token path, took 1 s of CPU; 0.2 s are a step of the event loop."""
    strings = part * ((64 << 10) // len(part))
    body = b'{"a":' + b"[" * depth + strings + b"0" + b"]" * depth + rb',"b":"\\\u0000"}'
    with short_step(), pytest.raises(InvalidRequest) as refused:
        check_text(body)
    assert refused.value.field == "b"


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


def test_work_on_strict_schemas_is_bounded() -> None:
    """Variants of 900 KB took 1.6 s of CPU, the square of the names would take minutes, and paths as texts 300 MB."""
    names = [f"p{number}" for number in range(300_000)]
    wide = changed(properties={name: {} for name in names}, required=names)
    listed = changed(properties={"a": {"type": "object", "required": names}})
    varied, nested = changed(properties={"a": {"anyOf": [{}] * 300_000}}), changed(properties={"a": {}})
    for _ in range(100_000):
        nested = changed(properties={"a": {"items": nested["properties"]["a"]}})
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": f"f{number}", "strict": True, "parameters": each}}
        for number, each in enumerate([changed(properties={"a": {"anyOf": [{}] * 2_000}})] * 100)
    ]
    checks: list[Callable[[], Any]] = [
        *(partial(check_strict, schema, "s", "f") for schema in (wide, listed, varied, nested)),
        partial(declared_tools, tools),
        partial(tools_of, [each["function"] | each for each in tools]),
    ]
    for check in checks:
        with short_step(), pytest.raises(InvalidRequest, match="more than 20,000 parts"):
            check()
    deep: dict[str, Any] = {"$defs": {name: {} for name in names[:9_000]}}
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
