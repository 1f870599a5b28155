"""``echo`` and ``best_of`` of completions."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.sample_tokenizers import EOS, byte_fallback_tokenizer
from tests.unit.gateway.openai.test_asgi_app import events_of
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig

BODY: dict[str, Any] = {"model": "echo", "prompt": "hello  Hello ", "max_tokens": 4}


@pytest.mark.parametrize("ids", [False, True])
async def test_echo_begins_with_the_prompt(rig: TokenPathRig, ids: bool) -> None:
    prompt = rig.tokenizer.encode(BODY["prompt"]).ids if ids else BODY["prompt"]
    plain = (await rig.http.post("/v1/completions", json={**BODY, "n": 2})).json()
    body = {**BODY, "prompt": prompt, "n": 2, "echo": True}
    reply = (await rig.http.post("/v1/completions", json=body)).json()
    texts = [BODY["prompt"] + choice["text"] for choice in plain["choices"]]
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert reply["usage"] == plain["usage"]
    events = events_of((await rig.http.post("/v1/completions", json={**body, "stream": True})).text)
    for index, text in enumerate(texts):
        pieces = [each["text"] for event in events for each in event["choices"] if each["index"] == index]
        assert pieces[0] == BODY["prompt"] and "".join(pieces) == text


async def test_echo_of_each_prompt_is_its_own(rig: TokenPathRig) -> None:
    body = {**BODY, "prompt": ["hello", "Hello "], "echo": True}
    reply = (await rig.http.post("/v1/completions", json=body)).json()
    assert [choice["text"][:6] for choice in reply["choices"]] == ["hellohello"[:6], "Hello "]


async def test_echo_joins_a_character_that_the_answer_completes(make_rig: MakeRig) -> None:
    """With a tokenizer that strips the first space of a text, and a prompt that ends within a character."""
    tokenizer = Tokenizer.from_str(byte_fallback_tokenizer().decode())
    tokenizer.add_special_tokens([EOS])
    rig = await make_rig(tokenizer=tokenizer.to_str().encode())
    first, second = (tokenizer.get_vocab()[name] for name in ("<0xC3>", "<0xA9>"))
    prompt = [second, *tokenizer.encode("hello", add_special_tokens=False).ids, first]
    body = {**BODY, "prompt": prompt, "echo": True}
    reply = (await rig.http.post("/v1/completions", json=body)).json()
    text = tokenizer.decode([*prompt, *rig.echoed(prompt, 4)])
    assert "helloé" in text and reply["choices"][0]["text"] == text


async def test_best_of_returns_the_likeliest_and_bills_all(rig: TokenPathRig) -> None:
    """The choices have 2, 1 and 3 tokens, each token less likely than the one before."""
    body = {**BODY, "prompt": "hello ", "max_tokens": 9, "stop": "llo"}
    every = (await rig.http.post("/v1/completions", json={**body, "n": 3})).json()
    assert [choice["text"] for choice in every["choices"]] == ["he", "", " he"]
    best = (await rig.http.post("/v1/completions", json={**body, "n": 2, "best_of": 3})).json()
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in best["choices"]] == [
        (0, "", None),
        (1, "he", None),
    ]
    assert best["usage"] == every["usage"] and best["usage"]["completion_tokens"] == 6
    assert [usage.num_output_tokens for usage in rig.ports.settled[best["id"]]] == [2, 1, 3]
    shown = (await rig.http.post("/v1/completions", json={**body, "best_of": 3, "logprobs": 0})).json()
    assert [choice["logprobs"]["token_logprobs"] for choice in shown["choices"]] == [[-0.5]]


async def test_best_of_all_choices_keeps_their_order(rig: TokenPathRig) -> None:
    body = {**BODY, "prompt": "hello ", "stop": "llo", "n": 3}
    every = (await rig.http.post("/v1/completions", json=body)).json()
    best = (await rig.http.post("/v1/completions", json={**body, "best_of": 3})).json()
    assert best["choices"] == every["choices"]
    assert (await rig.http.post("/v1/completions", json={**body, "best_of": 3, "stream": True})).status_code == 200
