from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_overflowing_checkpoint, reference_model
from tests.unit.engine.harness import Model, ModelOf, assert_idle, group_of, hand_over, outputs, prompt_of, run
from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.core import NO_TOKEN, Finish, NewToken, SamplingParams
from torchrelay.engine.sampling.sampler import uniform


def test_uniform_is_fixed_function_of_counter() -> None:
    """Golden values: a change would alter resumed requests while workers of two versions run."""
    assert uniform(0, 0, 0) == 0.156742553465558
    assert uniform(2**64 - 1, 3, 1000) == 0.7515824167881524
    numbers = [uniform(5, choice, position) for choice in range(20) for position in range(200)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02


SEEDED: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.6, "frequency_penalty": 0.3, "logit_bias": ((9, 3.0),)},
    {"temperature": 0.0, "frequency_penalty": 1.0},
    {"temperature": 0.8, "repetition_penalty": 1.3, "min_tokens": 20, "stop_token_ids": frozenset(range(0, 250, 2))},
]


@pytest.mark.parametrize("settings", SEEDED, ids=["cut", "penalised", "greedy", "repetition"])
def test_seed_gives_same_tokens_in_any_batch(model_of: ModelOf, settings: dict[str, Any]) -> None:
    """Alone, in a batch of 32 that sample in every way, and resumed on another worker, here or handed over."""
    model = model_of("qwen2")
    sampling = SamplingParams(**settings, seed=77, max_tokens=20)
    group = group_of(prompt_of(30), "a/0", sampling)
    alone = model.instance()
    alone.prefill(group)
    expected = outputs(run(alone))["a/0", 0]
    crowd = model.instance(token_budget=32)
    for number in range(31):
        other = SamplingParams(**SEEDED[number % 4], seed=number, max_tokens=24, top_logprobs=number % 2 or None)
        crowd.prefill(group_of(prompt_of(5 + number, salt=number), f"{number}/0", other))
    crowd.prefill(group)
    assert outputs(run(crowd))["a/0", 0] == expected
    for num_forced in (1, 8, 19):
        resumed = model.instance()
        forced = [expected[:num_forced]]
        resumed.prefill(group_of(prompt_of(30), "a/1", sampling, forced=forced))
        assert outputs(run(resumed))["a/1", 0] == expected[num_forced:]
        last, steps = hand_over(model.instance(), model.instance(), group_of(prompt_of(30), "a/2", sampling, forced))
        tokens = [last.tokens[0].token_id, *outputs(steps).get(("a/2", 0), [])]
        assert tokens == expected[num_forced:]
    assert_idle(crowd)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_overflowing_checkpoint(tmp_path_factory.mktemp("overflowing")))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overflowing_logits_end_only_their_group(overflowing: Model, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=12)
    groups = [group_of(prompt_of(9 + salt, salt), f"{salt}/0", sampling) for salt in range(16)]
    alone: dict[str, list[NewToken]] = {}
    for group in groups:
        instance = overflowing.instance()
        instance.prefill(group)
        alone[group.group_id] = [token for step in run(instance) for token in step.tokens]
        assert_idle(instance)
    ends = [tokens[-1] for tokens in alone.values()]
    assert {token.finish for token in ends} == {Finish.NOT_FINITE, Finish.LENGTH}
    assert {token.token_id for token in ends if token.finish is Finish.NOT_FINITE} == {NO_TOKEN}
    assert len({token.position for token in ends}) > 2  # with the first token, and later ones
    together = overflowing.instance()
    for group in groups:
        together.prefill(group)
    steps = run(together)
    assert {key[0]: tokens for key, tokens in outputs(steps).items()} == {
        name: [token.token_id for token in tokens] for name, tokens in alone.items()
    }
    assert_idle(together)


def test_overflowing_choice_ends_alone(overflowing: Model) -> None:
    """The engine ends what it cannot sample; the caller decides about the rest."""
    actual = set()
    for salt in range(4):
        instance = overflowing.instance()
        sampling = SamplingParams(temperature=1.5, seed=salt, max_tokens=12)
        instance.prefill(group_of(prompt_of(9, salt + 20), sampling=sampling, forced=[(), (), ()]))
        ends = {token.choice: token for step in run(instance) for token in step.tokens}
        actual.add(frozenset(token.finish for token in ends.values()))
        assert_idle(instance)
    assert frozenset({Finish.NOT_FINITE, Finish.LENGTH}) in actual


def test_logit_bias_forces_and_forbids_tokens(model_of: ModelOf) -> None:
    model = model_of()
    free = model.expected(prompt_of(12))

    def tokens(**settings: object) -> list[int]:
        instance = model.instance()
        sampling = SamplingParams(temperature=0, max_tokens=24, **settings)  # type: ignore[arg-type]
        instance.prefill(group_of(prompt_of(12), sampling=sampling))
        return outputs(run(instance))["r/0", 0]

    assert tokens(logit_bias=((7, 100.0),)) == [7] * 24
    assert not set(tokens(logit_bias=tuple((token, -100.0) for token in set(free)))) & set(free)
    assert tokens(logit_bias=((free[0], 0.0),)) == free
    assert len(set(tokens(presence_penalty=50.0, logit_bias=tuple((t, 90.0) for t in range(30, 60))))) == 24


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_transformers(model_of: ModelOf, penalty: float) -> None:
    model = model_of("qwen3")
    prompt = list(prompt_of(30))
    reference = reference_model(model.folder)
    ids = torch.tensor([prompt])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "repetition_penalty": penalty}
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
    assert expected != model.expected(tuple(prompt))[:20]
    instance = model.instance()
    sampling = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=penalty)
    instance.prefill(group_of(prompt, sampling=sampling))
    assert outputs(run(instance))["r/0", 0] == expected


def test_repetition_penalty_needs_tokens_of_the_vocabulary(model_of: ModelOf) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3)
    group = replace(group_of(prompt_of(5), sampling=sampling), distinct_prompt_tokens=array("q", [5, 1 << 20]))
    instance = model_of().instance()
    with pytest.raises(InvalidRequest, match="token ids must be between 0 and"):
        instance.prefill(group)
    with pytest.raises(InvalidRequest, match="token ids must be between 0 and"):
        instance.import_kv(replace(group, prompt=()), instance.kv_layout(group))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_resume_rebuilds_penalty_counts(model_of: ModelOf, temperature: float) -> None:
    model = model_of("qwen3")
    sampling = SamplingParams(
        temperature=temperature, seed=5, max_tokens=24, frequency_penalty=1.5, presence_penalty=0.5
    )
    bias = tuple((token, 8.0) for token in range(6))  # few likely tokens, so that they come again
    sampling = replace(sampling, logit_bias=bias)
    instance = model.instance()
    instance.prefill(group_of(prompt_of(20), sampling=sampling))
    whole = outputs(run(instance))["r/0", 0]
    assert max(Counter(whole).values()) > 1
    for num_forced in (1, 9):
        resumed = model.instance()
        group = group_of(prompt_of(20), sampling=sampling, forced=[whole[:num_forced]])
        last, steps = hand_over(resumed, model.instance(), group)
        assert [last.tokens[0].token_id, *outputs(steps)["r/0", 0]] == whole[num_forced:]


def test_logprobs_are_unmodified_model_logprobs(model_of: ModelOf) -> None:
    model = model_of()
    prompt = prompt_of(20)
    expected = model.logits(prompt)[0].log_softmax(0)
    for top, sampling in ((3, SamplingParams(temperature=0.7, seed=2, logit_bias=((3, 50.0),))), (0, SamplingParams())):
        instance = model.instance()
        instance.prefill(group_of(prompt, sampling=replace(sampling, top_logprobs=top, max_tokens=3)))
        token = run(instance)[0].tokens[0]
        assert token.logprobs is not None
        assert abs(token.logprobs.chosen - float(expected[token.token_id])) < 1e-3
        assert [each for each, _ in token.logprobs.top] == expected.topk(top).indices.tolist()
        assert all(abs(value - float(expected[each])) < 1e-3 for each, value in token.logprobs.top)


@pytest.mark.parametrize("token", [-1, 320])
def test_logit_bias_beyond_vocabulary_is_refused(model_of: ModelOf, token: int) -> None:
    instance = model_of().instance()
    group = group_of(prompt_of(5), sampling=SamplingParams(logit_bias=((token, 1.0),)))
    with pytest.raises(InvalidRequest) as refused:
        instance.prefill(group)
    assert refused.value.field == "logit_bias"
    with pytest.raises(InvalidRequest):
        instance.import_kv(group, instance.kv_layout(group))
    assert_idle(instance)
