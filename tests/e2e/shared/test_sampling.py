"""Sampling through the whole HTTP path with real engines: seeds, logprobs, biases, and edge cases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from tests.e2e.tenants import Tenant
from tests.support.checkpoints import reference_model
from tests.support.completions import complete, headers
from tests.support.http import http
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e
PROMPT = [(7 * i) % 251 for i in range(1, 40)]
CONTEXT = 512


def tokens_of(answer: dict[str, Any]) -> list[int]:
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


def test_seed_repeats_the_tokens_in_a_batch_of_32(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model("llama")
    options: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 1.0,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {"9": 2.0},
        "ignore_eos": True,
    }

    def ask(seed: int) -> list[int]:
        return tokens_of(complete(platform, tenant.key, model, PROMPT[: 5 + seed % 30], seed=seed, **options))

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(ask, range(32)))
    assert together[:4] == alone
    assert len({tuple(tokens) for tokens in together}) == 32


def test_logprobs_equal_transformers(platform: Platform, tenant: Tenant) -> None:
    client = openai.OpenAI(base_url=f"{platform.http}/v1", api_key=tenant.key)
    answer = client.completions.create(
        model=tenant.model("llama"),
        prompt=PROMPT,
        max_tokens=8,
        temperature=0.7,
        seed=4,
        logprobs=5,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.token_logprobs is not None and told.top_logprobs is not None
    tokens: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    with torch.no_grad():
        logits = reference_model(tenant.checkpoint("llama"))(torch.tensor([PROMPT + tokens])).logits[0]
    expected = logits[len(PROMPT) - 1 : -1].float().log_softmax(-1)
    for place, token in enumerate(tokens):
        assert told.token_logprobs[place] == pytest.approx(float(expected[place, token]), abs=1e-3)
        # Ids unknown to the tokenizer all have empty text: only the most likely of them is returned.
        possible = [*expected[place].topk(5).values.tolist(), float(expected[place, token])]
        values = list(told.top_logprobs[place].values())
        assert values[0] == pytest.approx(possible[0], abs=1e-3)
        assert all(any(abs(value - logprob) < 1e-3 for logprob in possible) for value in values)


def test_logprobs_of_prompts_equal_transformers(platform: Platform, tenant: Tenant) -> None:
    """As evaluation harnesses ask for them: several prompts of token ids, echoed, whose tokens are scored."""
    prompts = [PROMPT, [9, *PROMPT[:20]], PROMPT[5:12]]
    answer = complete(platform, tenant.key, tenant.model("llama"), prompts, max_tokens=0, echo=True, logprobs=3)
    assert answer["usage"] == {
        "prompt_tokens": sum(map(len, prompts)),
        "completion_tokens": 0,
        "total_tokens": sum(map(len, prompts)),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    reference = reference_model(tenant.checkpoint("llama"))
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)[:-1]
        chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None]).flatten().tolist()
        told = choice["logprobs"]
        assert told["token_logprobs"] == [None, *(pytest.approx(value, abs=1e-3) for value in chosen)]
        assert told["top_logprobs"][0] is None and choice["finish_reason"] == "length"
        for own, top, row in zip(chosen, told["top_logprobs"][1:], expected, strict=True):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-3)
            assert min(top.values()) >= min(own, float(row.topk(3).values[-1])) - 1e-3
        assert [len(each) for each in told.values()] == [len(prompt)] * 4


def test_logprobs_of_answers_follow_those_of_the_prompt(platform: Platform, tenant: Tenant) -> None:
    options: dict[str, Any] = {"max_tokens": 5, "logprobs": 0, "seed": 3, "ignore_eos": True}
    model = tenant.model("llama")
    plain = complete(platform, tenant.key, model, PROMPT, **options)["choices"][0]
    whole = complete(platform, tenant.key, model, PROMPT, **options, echo=True, prompt_logprobs=2, n=2)
    for choice in whole["choices"]:
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(PROMPT) + 5
        described = choice["prompt_logprobs"]
        assert described[0] is None and len(described) == len(PROMPT)
        for token, value, entry in zip(PROMPT[1:], told["token_logprobs"][1:], described[1:], strict=False):
            assert entry[str(token)]["logprob"] == value
            assert entry[str(token)]["rank"] <= 2 or len(entry) == 3
    texts = complete(platform, tenant.key, model, "größer 🚀!", max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert texts["text"] == "größer 🚀!"
    for token, begin in zip(texts["logprobs"]["tokens"], texts["logprobs"]["text_offset"], strict=True):
        assert token.startswith("\\x") or texts["text"][begin:].startswith(token)
    first = whole["choices"][0]
    assert first["logprobs"]["token_logprobs"][len(PROMPT) :] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-3
    )
    begin = len(first["text"]) - len(plain["text"])
    shifted = [begin + offset for offset in plain["logprobs"]["text_offset"]]
    assert first["logprobs"]["text_offset"][len(PROMPT) :] == shifted
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": model, "messages": messages, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    chat = http.post(f"{platform.http}/v1/chat/completions", json=body, headers=headers(tenant.key), timeout=60).json()
    own = [next(iter(entry)) for entry in chat["prompt_logprobs"][1:]]
    assert own == [str(token) for token in chat["prompt_token_ids"][1:]]


def test_best_of_returns_the_likeliest_choice(platform: Platform, tenant: Tenant) -> None:
    client = openai.OpenAI(base_url=f"{platform.http}/v1", api_key=tenant.key)
    settings: dict[str, Any] = {"model": tenant.model("llama"), "prompt": "hello", "max_tokens": 6, "seed": 3}
    every = client.completions.create(**settings, n=4, logprobs=0)
    best = client.completions.create(**settings, best_of=4, echo=True)

    def mean(choice: openai.types.CompletionChoice) -> float:
        assert choice.logprobs is not None
        logprobs = choice.logprobs.token_logprobs or []
        return sum(logprobs) / len(logprobs)

    assert [choice.text for choice in best.choices] == ["hello" + max(every.choices, key=mean).text]
    assert best.usage == every.usage and best.choices[0].logprobs is None


def test_penalty_and_min_tokens_change_the_answer(platform: Platform, tenant: Tenant) -> None:
    """The prompt's tokens count, though the decode worker does not have the prompt."""
    reference = reference_model(tenant.checkpoint("llama"))
    ids = torch.tensor([PROMPT])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "repetition_penalty": 1.4}
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(PROMPT) :].tolist()
    model, options = tenant.model("llama"), {"temperature": 0, "repetition_penalty": 1.4, "max_tokens": 16}
    answer = complete(platform, tenant.key, model, PROMPT, **options, ignore_eos=True)
    assert tokens_of(answer) == expected
    ended = complete(platform, tenant.key, model, PROMPT, **options, stop_token_ids=expected[:1], min_tokens=4)
    assert len(tokens_of(ended)) > 4 and expected[0] not in tokens_of(ended)[:4]


def test_chat_streams_its_logprobs(platform: Platform, tenant: Tenant) -> None:
    client = openai.OpenAI(base_url=f"{platform.http}/v1", api_key=tenant.key)
    wishes: dict[str, Any] = {"model": tenant.model("llama"), "max_tokens": 10, "seed": 2, "logprobs": True}
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(messages=messages, top_logprobs=2, n=2, **wishes)
    for index, choice in enumerate(whole.choices):
        assert choice.index == index and choice.logprobs is not None
        spelt = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content or [])
        assert spelt.decode(errors="replace").startswith((choice.message.content or "").rstrip("\ufffd"))
    stream = client.chat.completions.create(messages=messages, top_logprobs=2, stream=True, **wishes)
    told = [
        entry
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    for streamed, entry in zip(told, whole.choices[0].logprobs.content or [], strict=True):
        assert streamed.bytes == entry.bytes and streamed.logprob == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param"),
    [(1, 3, None), (CONTEXT - 1, 1, None), (CONTEXT, 1, "prompt"), (CONTEXT - 1, 32_000, None), (0, 1, "prompt")],
)
def test_prompts_at_the_limits_of_the_context_are_served(
    platform: Platform, tenant: Tenant, num_prompt_tokens: int, max_tokens: int, param: str | None
) -> None:
    prompt = [(7 * i) % 251 for i in range(num_prompt_tokens)]
    body = {"model": tenant.model("llama"), "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    response = http.post(f"{platform.http}/v1/completions", json=body, headers=headers(tenant.key), timeout=60)
    if param is None:
        assert response.json()["usage"]["completion_tokens"] == min(max_tokens, CONTEXT - num_prompt_tokens)
    else:
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
