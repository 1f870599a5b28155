"""OpenAI request bodies: accepted, ignored and rejected fields."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.core import ServiceClass
from torchrelay.gateway.openai.requests import (
    IGNORED,
    decode_chat,
    decode_completion,
    params_of_chat,
    params_of_completion,
)


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "c"}], **fields}).encode()


def test_unknown_and_empty_fields_are_ignored() -> None:
    text = completion(user="u", metadata={}, presence_penalty=0, logit_bias={}, best_of=1, echo=False)
    assert params_of_completion(decode_completion(text)) == params_of_completion(decode_completion(completion()))
    talk = chat(
        tools=[], tool_choice="none", response_format={"type": "text"}, logprobs=False, top_logprobs=0, store=True
    )
    assert params_of_chat(decode_chat(talk)) == params_of_chat(decode_chat(chat()))


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("skip_special_tokens", False, True),
        ("include_stop_str_in_output", True, False),
        ("truncate_prompt_tokens", 1, None),
        ("prompt_logprobs", 0, None),
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
    ],
)
def test_fields_of_other_servers_are_not_ignored(name: str, value: object, harmless: object) -> None:
    for decode, body in ((decode_chat, chat), (decode_completion, completion)):
        decode(body(**{name: harmless}))
        with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet") as caught:
            decode(body(**{name: value}))
        assert caught.value.field == name


def test_fields_of_other_routers_are_ignored_and_documented() -> None:
    listed = (
        (Path(__file__).parents[4] / "docs/rest.md")
        .read_text()
        .partition("**Accepted and without effect**")[2]
        .partition("\n\n")[0]
    )
    assert {name for name in IGNORED if f"`{name}`" in listed} == IGNORED
    routers = {
        "provider": {"order": ["a", "b"], "allow_fallbacks": False},
        "models": ["m", "n"],
        "route": "fallback",
        "transforms": ["middle-out"],
        "usage": {"include": True},
        "user": "u-1",
    }
    for extras in (routers, dict.fromkeys(IGNORED, "x")):
        assert params_of_chat(decode_chat(chat(**extras))) == params_of_chat(decode_chat(chat()))
        assert params_of_completion(decode_completion(completion(**extras))) == params_of_completion(
            decode_completion(completion())
        )


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("chat_template", "{{ messages }}", None),
        ("documents", [{}], []),
        ("add_generation_prompt", False, True),
        ("continue_final_message", True, False),
    ],
)
def test_template_fields_of_other_servers_are_not_ignored(name: str, value: object, harmless: object) -> None:
    decode_chat(chat(**{name: harmless}))
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet") as caught:
        decode_chat(chat(**{name: value}))
    assert caught.value.field == name


def test_template_kwargs_are_passed_on() -> None:
    kwargs = {"enable_thinking": False, "thinking_budget": 4, "style": {"tone": ["plain"]}}
    assert params_of_chat(decode_chat(chat(chat_template_kwargs=kwargs))).template_kwargs == kwargs
    assert params_of_chat(decode_chat(chat(chat_template_kwargs={}))) == params_of_chat(decode_chat(chat()))


@pytest.mark.parametrize("given", [None, True, False])
def test_add_special_tokens_is_passed_on(given: bool | None) -> None:
    assert params_of_chat(decode_chat(chat(add_special_tokens=given))).add_special_tokens is given
    assert params_of_completion(decode_completion(completion(add_special_tokens=given))).add_special_tokens is given


@pytest.mark.parametrize(
    ("tier", "service_class"),
    [
        (None, None),
        ("auto", None),
        ("default", ServiceClass.STANDARD),
        ("scale", ServiceClass.STANDARD),
        ("priority", ServiceClass.INTERACTIVE),
        ("flex", ServiceClass.BATCH),
    ],
)
def test_service_tier_names_the_class(tier: str | None, service_class: ServiceClass | None) -> None:
    assert params_of_chat(decode_chat(chat(service_tier=tier))).service_class is service_class
    assert params_of_completion(decode_completion(completion(service_tier=tier))).service_class is service_class


def test_seeds_of_64_bits_are_accepted() -> None:
    for seed in (-(1 << 63), -1, 0, (1 << 63) - 1):
        assert params_of_chat(decode_chat(chat(seed=seed))).seed == seed % (1 << 64)
    body = decode_chat(chat(stream=True, stream_options={"include_usage": True}))
    assert body.stream_options is not None and body.stream_options.include_usage


@pytest.mark.parametrize("tier", ["fast", "", "Priority"])
def test_unknown_service_tier_is_refused(tier: str) -> None:
    with pytest.raises(InvalidRequest, match=f"must be one of .*flex.* not '{tier}'") as caught:
        params_of_chat(decode_chat(chat(service_tier=tier)))
    assert caught.value.field == "service_tier"


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("p", "p", None), (["p"], "p", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2)), ([], None, ())],
)
def test_prompt_forms_are_decoded(prompt: object, text: str | None, token_ids: tuple[int, ...] | None) -> None:
    params = params_of_completion(decode_completion(completion(prompt=prompt)))
    assert (params.text, params.token_ids) == (text, token_ids)


def test_message_forms_are_decoded() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None},
    ]
    params = params_of_chat(decode_chat(chat(messages=messages, max_tokens=3, max_completion_tokens=4)))
    assert params.messages == ({"role": "system", "content": "a\nb", "name": "n"}, {"role": "assistant", "content": ""})
    assert (params.max_tokens, params.max_tokens_field) == (4, "max_completion_tokens")


def test_sampling_is_as_given_or_default() -> None:
    plain = params_of_completion(decode_completion(completion()))
    assert (plain.temperature, plain.top_p, plain.top_k, plain.num_choices, plain.stop) == (1.0, 1.0, 0, 1, ())
    given_ = completion(temperature=0, top_p=0.5, top_k=-1, n=2, stop="x", seed=-1, ignore_eos=True)
    params = params_of_completion(decode_completion(given_))
    assert (params.temperature, params.top_p, params.top_k, params.num_choices) == (0.0, 0.5, 0, 2)
    assert (params.stop, params.seed, params.ignore_eos) == (("x",), (1 << 64) - 1, True)


def test_distribution_parameters_are_passed_on() -> None:
    wishes: dict[str, Any] = {
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 2.0,
        "logit_bias": {"7": -100, "3": 5.5},
        "stop_token_ids": [4, 9, 4],
    }
    for params in (
        params_of_chat(decode_chat(chat(**wishes, logprobs=True, top_logprobs=20))),
        params_of_completion(decode_completion(completion(**wishes, logprobs=5))),
    ):
        assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.1, -2.0, 2.0)
        assert params.logit_bias == ((3, 5.5), (7, -100.0))
        assert params.stop_token_ids == (4, 9)
        assert params.top_logprobs in (20, 5)
    assert params_of_chat(decode_chat(chat(logprobs=True))).top_logprobs == 0
    assert params_of_completion(decode_completion(completion(logprobs=0))).top_logprobs == 0
    assert params_of_completion(decode_completion(completion())).top_logprobs is None


RANGES = [
    ("temperature", (0, 2), (-0.01, 2.01), "must be between 0 and 2"),
    ("top_p", (0, 0.01, 1), (-0.5, 1.01), "must be between 0 and 1"),
    ("min_p", (0, 1), (-0.01, 1.01), "must be between 0 and 1"),
    ("presence_penalty", (-2, 2), (-2.01, 2.01), "must be between -2 and 2"),
    ("frequency_penalty", (-2, 2), (-2.01, 2.01), "must be between -2 and 2"),
]


@pytest.mark.parametrize(("name", "good", "bad", "said"), RANGES, ids=[each[0] for each in RANGES])
def test_numbers_out_of_range_are_refused(
    name: str, good: tuple[float, ...], bad: tuple[float, ...], said: str
) -> None:
    for value in good:
        assert getattr(params_of_chat(decode_chat(chat(**{name: value}))), name) == value
    for value in bad:
        with pytest.raises(InvalidRequest, match=said) as caught:
            params_of_completion(decode_completion(completion(**{name: value})))
        assert caught.value.field == name


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "logit_bias", "seed", "n"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_nan_and_infinity_are_refused_by_name(name: str, number: str) -> None:
    value = f'{{"5": {number}}}' if name == "logit_bias" else number
    for body, decode in ((completion(), decode_completion), (chat(), decode_chat)):
        with pytest.raises(InvalidRequest) as caught:
            decode(body[:-1] + f', "{name}": {value}}}'.encode())
        assert caught.value.field == name
        assert "finite" in caught.value.message or "range" in caught.value.message


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (
            chat(messages=[{"role": "usr", "content": "c"}]),
            "messages",
            "messages[0].role must be one of system, developer, user, assistant, tool, function, not 'usr'",
        ),
        (
            chat(messages=[{"role": "user", "content": "c"}, {"role": "system"}]),
            "messages",
            "messages[1] of role system",
        ),
        (chat(messages=[{"role": "user", "content": None}]), "messages", "must have content"),
        (chat(messages=[{"role": "user", "content": []}]), "messages", "must have content"),
        (chat(max_token=5), "max_token", "unknown field max_token; did you mean max_tokens?"),
        (chat(prediction={}, zzz=1, top_b=2), "top_b", "did you mean top_p?"),
        (chat(temperatur=1), "temperatur", "did you mean temperature?"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs", "top_logprobs must be between 0 and 20, not 21"),
        (chat(logprobs=True, top_logprobs=-1), "top_logprobs", "must be between 0 and 20"),
        (chat(top_logprobs=3), "logprobs", "top_logprobs requires logprobs to be true"),
        (chat(logprobs=3), "logprobs", "logprobs must be true or false, not 3"),
        (chat(tool_choice="auto"), "tool_choice", "tool_choice is allowed only with tools"),
        (chat(tool_choice="required", tools=[]), "tool_choice", "tool_choice is allowed only with tools"),
        (chat(parallel_tool_calls=True), "parallel_tool_calls", "parallel_tool_calls is allowed only with tools"),
        (chat(function_call="auto"), "function_call", "function_call is allowed only with functions"),
        (chat(stream_options={}), "stream_options", "stream_options is allowed only with stream: true"),
        (chat(tools=[{}], tool_choice="auto"), "tools", "tools[0].type must be 'function'"),
        (chat(seed=1 << 63), "seed", "seed must be between -2**63 and 2**63 - 1, not 9223372036854775808"),
        (chat(repetition_penalty=0), "repetition_penalty", "repetition_penalty must be between 0.01 and 10, not 0"),
        (chat(repetition_penalty=11), "repetition_penalty", "must be between 0.01 and 10"),
        (chat(chat_template_kwargs=[]), "chat_template_kwargs", "must be an object"),
        (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "must not contain messages"),
        (chat(chat_template_kwargs={"x": "y" * 17_000}), "chat_template_kwargs", "at most 32 entries, and 16,384"),
        (chat(chat_template_kwargs={str(each): 1 for each in range(33)}), "chat_template_kwargs", "at most 32 entries"),
        (chat(min_tokens=-1), "min_tokens", "min_tokens must be at least 0, not -1"),
    ],
)
def test_faults_in_a_chat_name_their_field(body: bytes, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_of_chat(decode_chat(body))
    assert caught.value.field == field
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", "model"),
        (b'{"model": "m"}', "prompt"),
        (completion(seed=1 << 70), "seed"),
        (completion(seed=1 << 63), "seed"),
        (completion(seed=-(1 << 63) - 1), "seed"),
        (completion(stream_options={"include_usage": True}), "stream_options"),
        (completion(stream_options={}, stream=False), "stream_options"),
        (completion(stop=[1]), "stop"),
        (completion(stream_options={"include_usage": 3}), "stream_options"),
        (completion(prompt=[1, "a"]), "prompt"),
        (completion(prompt=[1 << 40]), "prompt"),
        (completion(n=True), "n"),
        (completion(logprobs=6), "logprobs"),
        (completion(logprobs=-1), "logprobs"),
        (completion(logprobs=True), "logprobs"),
        (completion(logit_bias={"a": 1}), "logit_bias"),
        (completion(logit_bias={"-1": 1}), "logit_bias"),
        (completion(logit_bias={"٣": 1}), "logit_bias"),
        (completion(logit_bias={"5": 100.5}), "logit_bias"),
        (completion(logit_bias={str(token): 1 for token in range(1025)}), "logit_bias"),
        (completion(stop_token_ids=[-1]), "stop_token_ids"),
        (completion(stop_token_ids=5), "stop_token_ids"),
        (completion(stop_token_ids=list(range(65))), "stop_token_ids"),
        (b"[]", None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_faults_in_a_completion_name_their_field(body: bytes, field: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_of_completion(decode_completion(body))
    assert caught.value.field == field


def test_large_bodies_are_refused_as_quickly_as_read() -> None:
    """Decoding occupies the event loop, so all other requests wait for it."""
    zeros = b",".join([b"0"] * 1_000_000)
    wrong = [
        b'{"model": "m", "prompt": [%s], "temperature": NaN}' % zeros,
        b'{"model": "m", "prompt": "p", "logit_bias": {%s}}' % b",".join(b'"%d":1' % i for i in range(200_000)),
        b'{"model": "m", "prompt": [%s, "a"]}' % zeros,
        b'{"model": "m", "prompt": [%s], "n": 0.0}' % zeros.replace(b"0", b"0.0"),
    ]
    for body in wrong:
        begin = time.process_time()
        json.loads(body)
        read_s, begin = time.process_time() - begin, time.process_time()
        with pytest.raises(InvalidRequest):
            params_of_completion(decode_completion(body))
        assert time.process_time() - begin < 2 * read_s + 0.05


def test_whole_numbers_may_have_a_decimal_point() -> None:
    fields = (
        '"max_tokens": 4.0, "n":2.0 , "seed": -3e0, "top_k": 5.00, "stop_token_ids": [7.0,8.0, 9.0], "temperature": 1'
    )
    body = f'{{"model": "m", "prompt": [1.0, 2, 3.0], {fields}}}'.encode()
    params = params_of_completion(decode_completion(body))
    assert (params.token_ids, params.max_tokens, params.num_choices, params.top_k) == ((1, 2, 3), 4, 2, 5)
    assert (params.seed, params.stop_token_ids) == ((1 << 64) - 3, (7, 8, 9))
    assert params_of_completion(decode_completion(completion(prompt=[[1.0, 2.0]]))).token_ids == (1, 2)
    talk = [{"role": "user", "content": "[1.0, 4.0]"}]
    chat_params = params_of_chat(decode_chat(chat(messages=talk, max_completion_tokens=6.0)))
    assert (chat_params.max_tokens, chat_params.messages) == (6, tuple(talk))


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (completion(n=2.5), "n", "n must be an integer, not 2.5"),
        (completion(n=4.0, max_tokens=2.5), "max_tokens", "max_tokens must be an integer, not 2.5"),
        (completion(seed=1e300), "seed", "seed must be an integer, not 1e+300"),
        (completion(n="4.0"), "n", "n must be an integer, not '4.0'"),
        (completion(max_tokens=0.0), "max_tokens", "max_tokens must be at least 1, not 0"),
        (completion(stop_token_ids=[1.5]), "stop_token_ids", "stop_token_ids[0] must be an integer, not a number"),
    ],
)
def test_other_fractions_are_refused(body: bytes, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_of_completion(decode_completion(body))
    assert (caught.value.field, caught.value.message) == (field, said)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    "model messages prompt stop seed n max_tokens top_k stream_options logit_bias min_p logprobs top_logprobs"
    " stop_token_ids presence_penalty service_tier"
)
names = st.sampled_from(NAMES.split())


@given(st.dictionaries(names, json_values))
def test_any_body_is_decoded_or_refused(fields: dict[str, Any]) -> None:
    for body in (json.dumps({"model": "m", **fields}).encode(), completion(**fields), chat(**fields)):
        try:
            params_of_completion(decode_completion(body))
            params_of_chat(decode_chat(body))
        except InvalidRequest as error:
            assert error.message


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (chat(max_tokens="ten"), "max_tokens must be an integer, not 'ten'"),
        (chat(max_tokens=0), "max_tokens must be at least 1, not 0"),
        (chat(temperature="hot"), "temperature must be a number, not 'hot'"),
        (chat(stream="yes"), "stream must be true or false, not 'yes'"),
        (chat(logit_bias={"5": "x"}), "logit_bias[...] must be a number, not a string"),
        (chat(messages="a secret"), "messages must be a list, not a string"),  # errors do not repeat prompts
        (
            chat(messages=[{"role": "user", "content": 5}]),
            "messages[0].content must be a string or a list, not an integer",
        ),
        (chat(messages=[{"content": "c"}]), "messages[0].role is missing"),
        (b'{"messages": []}', "model is missing"),
        (b"[]", "the body must be an object, not a list"),
    ],
)
def test_wrong_types_are_explained(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_chat(body)
    assert caught.value.message == sentence
