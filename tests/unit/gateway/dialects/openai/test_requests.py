"""OpenAI request bodies: accepted, ignored and refused fields, formats of answers, and the grammar that workers get."""

from __future__ import annotations

import json
import string
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cpu_steps import short_step
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.answer_formats import JsonSchemaFormat, ResponseFormat, StructuredOutputs, answer_format
from torchrelay.gateway.bodies.shared_body import IGNORED
from torchrelay.gateway.bodies.strict_schemas import check_strict
from torchrelay.gateway.bodies.tools import declared_tools
from torchrelay.gateway.bodies.typo_hints import is_one_edit_away, typo_hint
from torchrelay.gateway.bodies.unusable_text import check_text
from torchrelay.gateway.core import ServiceClass
from torchrelay.gateway.dialects.openai.requests import (
    decode_chat,
    decode_completion,
    params_of_chat,
    params_of_completion,
)
from torchrelay.gateway.dialects.responses.tools import tools_of
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat, choice_rule, json_rule, regex_rule
from torchrelay.gateway.inference.core import GenerateParams

HUGE = 1 << 63


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "c"}], **fields}).encode()


def of_completion(body: Any = None, **fields: Any) -> GenerateParams:
    return params_of_completion(decode_completion(completion(**fields) if body is None else body))


def of_chat(body: Any = None, **fields: Any) -> GenerateParams:
    return params_of_chat(decode_chat(chat(**fields) if body is None else body))


def of_both(**fields: Any) -> tuple[GenerateParams, GenerateParams]:
    return of_chat(**fields), of_completion(**fields)


def test_fields_without_effect_are_ignored_and_documented() -> None:
    empty: dict[str, Any] = {"user": "u", "metadata": {}, "presence_penalty": 0, "logit_bias": {}, "tools": []}
    routers: dict[str, Any] = {
        "provider": {"order": ["a", "b"], "allow_fallbacks": False},
        "models": ["m", "n"],
        "route": "fallback",
        "transforms": ["middle-out"],
        "usage": {"include": True},
    }
    for extras in (empty, routers, dict.fromkeys(IGNORED, "x"), {"response_format": {"type": "text"}, "store": True}):
        assert of_both(**extras) == of_both()
    assert of_completion(best_of=1, echo=False) == of_completion()
    assert of_chat(tool_choice="none", logprobs=False, top_logprobs=0, chat_template_kwargs={}) == of_chat()
    page = (Path(__file__).parents[5] / "docs/rest.md").read_text()
    listed = page.partition("**Accepted and without effect**")[2].partition("\n\n")[0]
    assert {name for name in IGNORED if f"`{name}`" in listed} == IGNORED


OF_OTHER_SERVERS: list[tuple[str, object, object]] = [  # name, value with an effect, value without
    ("skip_special_tokens", False, True),
    ("include_stop_str_in_output", True, False),
    ("truncate_prompt_tokens", 1, None),
    ("allowed_token_ids", [1], []),
    ("bad_words", ["x"], []),
    ("use_beam_search", True, False),
    ("top_a", 0.2, 0),
    ("typical_p", 0.9, 1.0),
    ("tfs_z", 0.9, 1),
    ("mirostat", 2, 0),
    ("dry_multiplier", 0.8, 0.0),
    ("xtc_probability", 0.5, 0),
    ("no_repeat_ngram_size", 3, 0),
    ("length_penalty", 0.8, 1.0),
    ("early_stopping", True, False),
    ("regex", "a+", None),
    ("ebnf", "root ::= 'a'", None),
    ("grammar", "root ::= 'a'", None),
    ("json_schema", "{}", None),
    ("logits_processors", ["x"], []),
    ("custom_logit_processor", "x", None),
    ("lora_path", "x", None),
    ("plugins", [{"id": "web"}], []),
    ("web_search_options", {}, None),
    ("modalities", ["text", "audio"], ["text"]),
    ("audio", {"voice": "x"}, None),
    ("moderation", {"model": "x"}, None),
]
OF_OTHER_CHATS: list[tuple[str, object, object]] = [
    ("chat_template", "{{ messages }}", None),
    ("documents", [{}], []),
    ("add_generation_prompt", False, True),
]


def test_fields_of_other_servers_are_not_ignored() -> None:
    both: list[Callable[..., GenerateParams]] = [of_chat, of_completion]
    for listed, params in ((OF_OTHER_SERVERS, both), (OF_OTHER_CHATS, [of_chat])):
        for name, value, harmless in listed:
            for params_of in params:
                params_of(**{name: harmless})
                with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet") as caught:
                    params_of(**{name: value})
                assert caught.value.field == name


def test_service_tier_names_the_class() -> None:
    for tier, service_class in (
        (None, None),
        ("auto", None),
        ("default", ServiceClass.STANDARD),
        ("scale", ServiceClass.STANDARD),
        ("priority", ServiceClass.INTERACTIVE),
        ("flex", ServiceClass.BATCH),
    ):
        assert [params.service_class for params in of_both(service_tier=tier)] == [service_class] * 2


def test_sampling_is_as_given_or_default() -> None:
    for plain in of_both():
        assert (plain.temperature, plain.top_p, plain.top_k, plain.num_choices, plain.stop) == (1.0, 1.0, 0, 1, ())
        assert plain.top_logprobs is plain.add_special_tokens is None
    shared: dict[str, Any] = {
        "min_p": 0.1,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "temperature": 0.0,
        "top_p": 0.5,
        "ignore_eos": True,
        "add_special_tokens": False,
    }
    others: dict[str, Any] = {"logit_bias": {"7": -100, "3": 5.5}, "stop_token_ids": [4, 9, 4], "n": 2, "stop": "x"}
    for params in of_both(**shared, **others, top_k=-1):
        assert {name: getattr(params, name) for name in shared} == shared
        assert (params.logit_bias, params.stop_token_ids) == (((3, 5.5), (7, -100.0)), (4, 9))
        assert (params.num_choices, params.stop, params.top_k) == (2, ("x",), 0)
    for seed in (-HUGE, -1, 0, HUGE - 1):
        assert [params.seed for params in of_both(seed=seed)] == [seed % (1 << 64)] * 2
    assert [of_completion(logprobs=number).top_logprobs for number in (0, 5)] == [0, 5]
    assert [of_chat(logprobs=True, **top).top_logprobs for top in ({}, {"top_logprobs": 20})] == [0, 20]
    assert [each.prompt_logprobs for each in of_both()] == [None, None]
    assert [each.prompt_logprobs for each in of_both(prompt_logprobs=0, logprobs=None)] == [0, 0]
    echoed = [of_completion(echo=True, logprobs=2, prompt_logprobs=most).prompt_logprobs for most in (None, 1, 9)]
    assert echoed == [2, 2, 9]
    for name in ("max_tokens", "max_completion_tokens"):
        assert of_chat(prompt_logprobs=0, **{name: 0}).max_tokens == 0
    assert [of_completion(max_tokens=0, **asked).max_tokens for asked in ({"echo": True}, {"prompt_logprobs": 0})] == [
        0,
        0,
    ]
    options = decode_chat(chat(stream=True, stream_options={"include_usage": True})).stream_options
    assert options is not None and options.include_usage
    kwargs = {"enable_thinking": False, "thinking_budget": 4, "style": {"tone": ["plain"]}}
    assert of_chat(chat_template_kwargs=kwargs).template_kwargs == kwargs


def test_answer_may_continue_the_last_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    given: dict[str, Any] = {"messages": messages, "continue_final_message": True, "response_format": {"type": "text"}}
    assert of_chat(**given).continues_last and of_chat(**given, add_generation_prompt=False).continues_last
    assert not of_chat(messages=messages).continues_last
    with pytest.raises(InvalidRequest, match="the format of a whole answer"):
        of_chat(**{**given, "response_format": {"type": "json_object"}})


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("p", "p", None), (["p"], "p", None), ([1, 2], None, [1, 2]), ([[1, 2]], None, [1, 2]), ([], None, [])],
)
def test_prompt_forms_are_decoded(prompt: object, text: str | None, token_ids: list[int] | None) -> None:
    params = of_completion(prompt=prompt)
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
    params = of_chat(messages=messages, max_tokens=3, max_completion_tokens=4)
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


RANGES = [
    ("temperature", (0, 2), (-0.01, 2.01), "must be between 0 and 2"),
    ("top_p", (0, 0.01, 1), (-0.5, 1.01), "must be between 0 and 1"),
    ("min_p", (0, 1), (-0.01, 1.01), "must be between 0 and 1"),
    ("presence_penalty", (-2, 2), (-2.01, 2.01), "must be between -2 and 2"),
    ("frequency_penalty", (-2, 2), (-2.01, 2.01), "must be between -2 and 2"),
    ("repetition_penalty", (0.01, 10), (0, 11), "must be between 0.01 and 10"),
]


@pytest.mark.parametrize(("name", "good", "bad", "said"), RANGES, ids=[each[0] for each in RANGES])
def test_numbers_out_of_range_are_refused(
    name: str, good: tuple[float, ...], bad: tuple[float, ...], said: str
) -> None:
    for value in good:
        assert [getattr(params, name) for params in of_both(**{name: value})] == [value] * 2
    for value in bad:
        for params_of in (of_chat, of_completion):
            with pytest.raises(InvalidRequest, match=said) as caught:
                params_of(**{name: value})
            assert caught.value.field == name


def test_nan_and_infinity_are_refused_by_name() -> None:
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "logit_bias", "seed", "n"):
        for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
            value = f'{{"5": {number}}}' if name == "logit_bias" else number
            for body, params_of in ((completion(), of_completion), (chat(), of_chat)):
                with pytest.raises(InvalidRequest, match=r"finite|range") as caught:
                    params_of(body[:-1] + f', "{name}": {value}}}'.encode())
                assert caught.value.field == name


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


SECRET = "messages must be a list, not a string"  # errors do not repeat prompts
ROLES = "messages[0].role must be one of system, developer, user, assistant, tool, function, not 'usr'"


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        (chat(messages=[said("usr", "c")]), "messages", ROLES),
        (chat(messages=[said("user", "c"), {"role": "system"}]), "messages", "messages[1] of role system"),
        (chat(messages=[said("user", None)]), "messages", "must have content"),
        (chat(messages=[said("user", [])]), "messages", "must have content"),
        (chat(messages=[said("user", [{"type": "picture"}])]), "messages", "content of type 'picture' is not"),
        (chat(messages=[said("user", 5)]), "messages", "messages[0].content must be a string or a list, not an int"),
        (chat(messages=[{"content": "c"}]), "messages", "messages[0].role is missing"),
        (chat(messages="a secret"), "messages", SECRET),
        (b'{"messages": []}', "model", "model is missing"),
        (b"[]", None, "the body must be an object, not a list"),
        (chat(max_token=5), "max_token", "unknown field max_token; did you mean max_tokens?"),
        (chat(prediction={}, zzz=1, top_b=2), "top_b", "did you mean top_p?"),
        (chat(temperatur=1), "temperatur", "did you mean temperature?"),
        (chat(temperature="hot"), "temperature", "temperature must be a number, not 'hot'"),
        (chat(stream="yes"), "stream", "stream must be true or false, not 'yes'"),
        (chat(logit_bias={"5": "x"}), "logit_bias", "logit_bias[...] must be a number, not a string"),
        (chat(max_tokens="ten"), "max_tokens", "max_tokens must be an integer, not 'ten'"),
        (chat(max_tokens=0), "max_tokens", "max_tokens must be at least 1, not 0, without prompt_logprobs"),
        (chat(max_completion_tokens=0), "max_completion_tokens", "must be at least 1, not 0, without prompt_logprobs"),
        (chat(min_tokens=-1), "min_tokens", "min_tokens must be at least 0, not -1"),
        (chat(service_tier="Priority"), "service_tier", "must be one of auto, default, flex, priority"),
        (chat(service_tier=""), "service_tier", "not ''"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs", "top_logprobs must be between 0 and 20, not 21"),
        (chat(logprobs=True, top_logprobs=-1), "top_logprobs", "must be between 0 and 20"),
        (chat(prompt_logprobs=21), "prompt_logprobs", "must be between 0 and 20, not 21"),
        (chat(continue_final_message=True, add_generation_prompt=True), "add_generation_prompt", "must be false"),
        (chat(continue_final_message=True), "messages", "must be the assistant's"),
        (chat(top_logprobs=3), "logprobs", "top_logprobs requires logprobs to be true"),
        (chat(logprobs=3), "logprobs", "logprobs must be true or false, not 3"),
        (chat(tool_choice="auto"), "tool_choice", "tool_choice is allowed only with tools"),
        (chat(tool_choice="required", tools=[]), "tool_choice", "tool_choice is allowed only with tools"),
        (chat(parallel_tool_calls=True), "parallel_tool_calls", "parallel_tool_calls is allowed only with tools"),
        (chat(function_call="auto"), "function_call", "function_call is not supported yet"),
        (chat(stream_options={}), "stream_options", "stream_options is allowed only with stream: true"),
        (chat(tools=[{}], tool_choice="auto"), "tools", "tools[0].type must be 'function'"),
        (chat(seed=HUGE), "seed", "seed must be between -2**63 and 2**63 - 1, not 9223372036854775808"),
        (chat(chat_template_kwargs=[]), "chat_template_kwargs", "must be an object"),
        (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "must not contain messages"),
        (chat(chat_template_kwargs={"x": "y" * 17_000}), "chat_template_kwargs", "at most 32 entries, and 16,384"),
        (chat(chat_template_kwargs={str(each): 1 for each in range(33)}), "chat_template_kwargs", "at most 32 entries"),
        (chat(response_format={"type": "xml"}), "response_format", "type"),
        (chat(response_format={"type": "json_schema"}), "response_format", "schema"),
        (chat(guided_regex=""), "guided_regex", "must not be empty"),
    ],
)
def test_faults_in_a_chat_name_their_field(body: bytes, field: str | None, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_chat(body)
    assert caught.value.field == field and why in caught.value.message


MALFORMED = "prompt must be a text, a list of token ids, or a list of either"


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        (b"{}", "model", "model is missing"),
        (completion(model=3), "model", "model must be a string"),
        (b'{"model": "m"}', "prompt", "prompt is missing"),
        (completion(prompt=None), "prompt", "prompt must be"),
        (completion(prompt=[1, "a"]), "prompt", MALFORMED),
        (completion(prompt=[1 << 40]), "prompt", "token ids must be non-negative and below 2**32"),
        (completion(prompt=[-1]), "prompt", "token ids must be non-negative"),
        (completion(seed=1 << 70), "seed", "seed"),
        (completion(seed=-HUGE - 1), "seed", "must be between -2**63 and"),
        (completion(stream_options={"include_usage": True}), "stream_options", "only with stream: true"),
        (completion(stream_options={}, stream=False), "stream_options", "only with stream: true"),
        (completion(stream_options={"include_usage": 3}), "stream_options", "must be true or false"),
        (completion(stop=[1]), "stop", "stop"),
        (completion(stop=["a"] * 5), "stop", "stop"),
        (completion(stop=""), "stop", "stop"),
        (completion(n=True), "n", "n must be an integer"),
        (completion(n=2.5), "n", "n must be an integer, not 2.5"),
        (completion(n="4.0"), "n", "n must be an integer, not '4.0'"),
        (completion(n=4.0, max_tokens=2.5), "max_tokens", "max_tokens must be an integer, not 2.5"),
        (completion(max_tokens=0.0), "max_tokens", "max_tokens must be at least 1, not 0"),
        (completion(seed=1e300), "seed", "seed must be an integer, not 1e+300"),
        (completion(logprobs=6), "logprobs", "between 0 and 5"),
        (completion(logprobs=-1), "logprobs", "between 0 and 5"),
        (completion(logprobs=True), "logprobs", "must be an integer"),
        (completion(echo=True, logprobs=0, stream=True), "logprobs", "not possible in a stream"),
        (completion(prompt_logprobs=0, stream=True), "prompt_logprobs", "not possible in a stream"),
        (completion(prompt_logprobs=-1), "prompt_logprobs", "must be between 0 and 20, not -1"),
        (completion(suffix="x"), "suffix", "suffix is not supported yet"),
        (completion(best_of=2, n=3), "best_of", "best_of must be at least n (3), not 2"),
        (completion(best_of=2, stream=True), "best_of", "not possible in a stream"),
        (completion(logit_bias={"a": 1}), "logit_bias", "logit_bias"),
        (completion(logit_bias={"-1": 1}), "logit_bias", "logit_bias"),
        (completion(logit_bias={"٣": 1}), "logit_bias", "logit_bias"),
        (completion(logit_bias={"5": 100.5}), "logit_bias", "logit_bias"),
        (completion(logit_bias={str(token): 1 for token in range(1025)}), "logit_bias", "at most 1024"),
        (completion(stop_token_ids=[-1]), "stop_token_ids", "stop_token_ids"),
        (completion(stop_token_ids=5), "stop_token_ids", "must be a list"),
        (completion(stop_token_ids=list(range(65))), "stop_token_ids", "at most 64"),
        (completion(stop_token_ids=[1.5]), "stop_token_ids", "stop_token_ids[0] must be an integer, not a number"),
        (completion(guided_json={}, guided_regex="a"), "guided_regex", "guided_json and guided_regex"),
        (completion(guided_json="{"), "guided_json", "guided_json is no JSON"),
        (completion(structured_outputs={"choice": []}), "structured_outputs", "must have 1 to"),
        (
            completion(structured_outputs={"choice": ["a"], "structural_tag": "{}"}),
            "structured_outputs",
            "structural_tag",
        ),
        (b"[]", None, "the body must be an object"),
        (b"", None, "the body is empty"),
        (b"\xff", None, "not valid JSON"),
        (rb'{"model": "m", "prompt": "p", "user": "a\ud800"}', "user", "user has a lone surrogate"),
    ],
)
def test_faults_in_a_completion_name_their_field(body: bytes, field: str | None, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_completion(body)
    assert caught.value.field == field and why in caught.value.message


def test_whole_numbers_may_have_a_decimal_point() -> None:
    fields = '"max_tokens": 4.0, "n":2.0 , "seed": -3e0, "top_k": 5.00, "stop_token_ids": [7.0,8.0, 9.0]'
    params = of_completion(f'{{"model": "m", "prompt": [1.0, 2, 3.0], {fields}, "temperature": 1}}'.encode())
    assert (params.token_ids, params.max_tokens, params.num_choices, params.top_k) == ([1, 2, 3], 4, 2, 5)
    assert (params.seed, params.stop_token_ids) == ((1 << 64) - 3, (7, 8, 9))
    assert of_completion(prompt=[[1.0, 2.0]]).token_ids == [1, 2]
    talk = [said("user", "[1.0, 4.0]")]
    chat_params = of_chat(messages=talk, max_completion_tokens=6.0)
    assert (chat_params.max_tokens, chat_params.messages) == (6, tuple(talk))


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
                of_completion(body)
        finally:
            sys.setprofile(None)
        assert len(called) < 1000 and "raw_decode" not in called, "the slower decoder is for small bodies"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    "model messages prompt stop seed n max_tokens top_k stream_options logit_bias min_p logprobs top_logprobs"
    " stop_token_ids presence_penalty service_tier"
)


@given(st.dictionaries(st.sampled_from(NAMES.split()), json_values))
def test_any_body_is_decoded_or_refused(fields: dict[str, Any]) -> None:
    for params_of, body in ((of_completion, completion(**fields)), (of_chat, chat(**fields))):
        try:
            params_of(body)
        except InvalidRequest as error:
            assert error.message


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
