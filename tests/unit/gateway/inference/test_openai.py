"""Bodies of OpenAI's clients: what is understood, ignored, refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.inference.openai import ask_of_chat, ask_of_completion, decode_chat, decode_completion


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "c"}], **fields}).encode()


def test_unknown_fields_and_empty_wishes_are_ignored() -> None:
    text = completion(user="u", metadata={}, presence_penalty=0, logit_bias={}, best_of=1, echo=False)
    assert ask_of_completion(decode_completion(text)) == ask_of_completion(decode_completion(completion()))
    talk = chat(tools=[], tool_choice="none", response_format={"type": "text"}, logprobs=False, store=True)
    assert ask_of_chat(decode_chat(talk)) == ask_of_chat(decode_chat(chat()))


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [("p", "p", None), (["p"], "p", None), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2)), ([], None, ())],
)
def test_forms_of_a_prompt(prompt: object, text: str | None, token_ids: tuple[int, ...] | None) -> None:
    ask = ask_of_completion(decode_completion(completion(prompt=prompt)))
    assert (ask.text, ask.token_ids) == (text, token_ids)


def test_forms_of_messages() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None},
    ]
    ask = ask_of_chat(decode_chat(chat(messages=messages, max_tokens=3, max_completion_tokens=4)))
    assert ask.messages == ({"role": "system", "content": "ab", "name": "n"}, {"role": "assistant", "content": ""})
    assert (ask.max_tokens, ask.max_tokens_field) == (4, "max_completion_tokens")


def test_sampling_as_given_and_as_by_default() -> None:
    plain = ask_of_completion(decode_completion(completion()))
    assert (plain.temperature, plain.top_p, plain.top_k, plain.num_choices, plain.stop) == (1.0, 1.0, 0, 1, ())
    given_ = completion(temperature=0, top_p=0.5, top_k=-1, n=2, stop="x", seed=-1, ignore_eos=True)
    ask = ask_of_completion(decode_completion(given_))
    assert (ask.temperature, ask.top_p, ask.top_k, ask.num_choices) == (0.0, 0.5, 0, 2)
    assert (ask.stop, ask.seed, ask.ignore_eos) == (("x",), (1 << 64) - 1, True)


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (chat(messages=[{"role": "usr", "content": "c"}]), "messages", "messages[0].role is 'usr'"),
        (
            chat(messages=[{"role": "user", "content": "c"}, {"role": "system"}]),
            "messages",
            "messages[1] of role system",
        ),
        (chat(messages=[{"role": "user", "content": None}]), "messages", "has no content"),
        (chat(messages=[{"role": "user", "content": []}]), "messages", "has no content"),
        (chat(max_token=5), "max_token", "max_token is not known: is max_tokens meant?"),
        (chat(temperatur=1), "temperatur", "is temperature meant?"),
    ],
)
def test_slips_in_a_chat_name_their_field(body: bytes, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_of_chat(decode_chat(body))
    assert caught.value.field == field
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", "model"),
        (b'{"model": "m"}', "prompt"),
        (completion(seed=1 << 70), "seed"),
        (completion(stop=[1]), "stop"),
        (completion(stream_options={"include_usage": 3}), "stream_options"),
        (completion(prompt=[1, "a"]), "prompt"),
        (completion(prompt=[1 << 40]), "prompt"),
        (completion(n=True), "n"),
        (b"[]", None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_faults_name_their_field(body: bytes, field: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_of_completion(decode_completion(body))
    assert caught.value.field == field


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["model", "messages", "prompt", "stop", "seed", "n", "max_tokens", "top_k", "stream_options"])


@given(st.dictionaries(names, json_values))
def test_no_body_does_worse_than_a_refusal(fields: dict[str, Any]) -> None:
    for body in (json.dumps({"model": "m", **fields}).encode(), completion(**fields), chat(**fields)):
        try:
            ask_of_completion(decode_completion(body))
            ask_of_chat(decode_chat(body))
        except InvalidRequest as error:
            assert error.message
