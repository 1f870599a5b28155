from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.unit.engine.running import assert_idle, group_of, hand_over, outputs, prompt_of, run
from tests.unit.engine.test_exactness import ModelOf
from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.sampling import adjusted, probabilities, sample, uniform

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.2, 2.4, -torch.inf, 0.0, 1.9])


def test_uniform_is_a_fixed_function_of_its_counter() -> None:
    """Golden values: a change would alter resumed requests while workers of two versions run."""
    assert uniform(0, 0, 0) == 0.156742553465558
    assert uniform(2**64 - 1, 3, 1000) == 0.7515824167881524
    numbers = [uniform(5, choice, position) for choice in range(20) for position in range(200)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.6, seed=2),
        SamplingParams(temperature=1.3, top_k=3, seed=3),
        SamplingParams(temperature=1.0, top_p=0.7, seed=4),
        SamplingParams(temperature=0.9, top_k=5, top_p=0.8, seed=5),
        SamplingParams(temperature=1.0, min_p=0.2, seed=6),
        SamplingParams(temperature=1.0, min_p=0.05, top_k=6, top_p=0.95, seed=7),
    ],
)
def test_frequencies_fit_the_definition(params: SamplingParams) -> None:
    """Chi-square against the probabilities, at one in a thousand."""
    wanted = probabilities(LOGITS, params).double()
    wanted /= wanted.sum()
    num_draws = 4000
    found = Counter(sample(LOGITS, params, 0, position) for position in range(num_draws))
    assert set(found) == {i for i, p in enumerate(wanted.tolist()) if p > 0}
    chi_square = sum((found[i] - num_draws * float(wanted[i])) ** 2 / (num_draws * float(wanted[i])) for i in found)
    assert chi_square < 24.4


def test_top_k_and_top_p_keep_what_they_should() -> None:
    def kept(**settings: float) -> set[int]:
        params = SamplingParams(temperature=1.0, **settings)  # type: ignore[arg-type]
        return set(probabilities(LOGITS, params).nonzero().flatten().tolist())

    assert kept(top_k=1) == {4}
    assert kept(top_k=3) == {1, 4, 7}
    assert kept(top_k=100) == set(range(8)) - {5}
    assert kept(top_p=0.0) == {4}
    # Of e^2.4, e^2.0, e^1.9, ...: 0.36, 0.24, 0.22, 0.11: the third one passes 0.7.
    assert kept(top_p=0.7) == {1, 4, 7}
    assert kept(top_k=2, top_p=0.99) == {1, 4}
    # e^-0.4, e^-0.5 and e^-1.2 of the likeliest are 0.67, 0.61 and 0.30.
    assert kept(min_p=0.65) == {1, 4}
    assert kept(min_p=0.2) == {1, 3, 4, 7}
    assert kept(min_p=1.0) == {4}


def test_temperature_zero_is_greedy_and_near_zero_nearly() -> None:
    assert sample(LOGITS, SamplingParams(temperature=0), 0, 0) == 4
    assert {sample(LOGITS, SamplingParams(temperature=1e-6), 0, position) for position in range(50)} == {4}


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_give_possible_tokens(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    monkeypatch.setattr("torchrelay.engine.sampling.uniform", lambda *_: number)
    logits = torch.tensor([-torch.inf, 1.0, 1.0, -torch.inf])
    assert sample(logits, SamplingParams(temperature=1.0), 0, 0) == (1 if number == 0 else 2)


def test_the_same_seed_gives_the_same_tokens_in_any_batch(model_of: ModelOf) -> None:
    model = model_of("qwen2")
    sampling = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=77, max_tokens=20)
    group = group_of(prompt_of(30), "a/0", sampling)
    alone = model.instance()
    alone.prefill(group)
    expected = outputs(run(alone))["a/0", 0]
    crowd = model.instance(token_budget=32)
    for number in range(31):
        crowd.prefill(group_of(prompt_of(5 + number, salt=number), f"{number}/0"))
    crowd.prefill(group)
    assert outputs(run(crowd))["a/0", 0] == expected
    resumed = model.instance()
    resumed.prefill(group_of(prompt_of(30), "a/1", sampling, forced=[expected[:8]]))
    assert outputs(run(resumed))["a/1", 0] == expected[8:]
    assert_idle(crowd)


def test_nan_gives_some_token_of_the_vocabulary() -> None:
    logits = torch.full((8,), torch.nan)
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5, top_k=3)):
        assert 0 <= sample(logits, params, 0, 0) < 8


def test_penalties_and_biases_shift_logits_as_openai_says() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((1, -3.0), (6, 2.0)))
    found = adjusted(LOGITS, params, {4: 3, 6: 1})
    shifts = {1: -3.0, 4: -(0.5 + 3 * 0.25), 6: 2.0 - 0.75}
    expected = LOGITS + torch.tensor([shifts.get(i, 0.0) for i in range(8)])
    assert torch.allclose(found, expected)
    assert adjusted(LOGITS, SamplingParams(), {4: 3}) is LOGITS


def test_biases_command_and_forbid(model_of: ModelOf) -> None:
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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_resume_rebuilds_what_penalties_count(model_of: ModelOf, temperature: float) -> None:
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


def test_logprobs_are_the_models_own(model_of: ModelOf) -> None:
    model = model_of()
    prompt = prompt_of(20)
    expected = model.logits(prompt).log_softmax(0)
    for top, sampling in ((3, SamplingParams(temperature=0.7, seed=2, logit_bias=((3, 50.0),))), (0, SamplingParams())):
        instance = model.instance()
        instance.prefill(group_of(prompt, sampling=replace(sampling, top_logprobs=top, max_tokens=3)))
        token = run(instance)[0].tokens[0]
        assert token.logprobs is not None
        assert abs(token.logprobs.chosen - float(expected[token.token_id])) < 1e-3
        assert [each for each, _ in token.logprobs.top] == expected.topk(top).indices.tolist()
        assert all(abs(value - float(expected[each])) < 1e-3 for each, value in token.logprobs.top)


@pytest.mark.parametrize("token", [-1, 320])
def test_a_bias_beyond_the_vocabulary_is_refused(model_of: ModelOf, token: int) -> None:
    instance = model_of().instance()
    group = group_of(prompt_of(5), sampling=SamplingParams(logit_bias=((token, 1.0),)))
    with pytest.raises(InvalidRequest) as refused:
        instance.prefill(group)
    assert refused.value.field == "logit_bias"
    with pytest.raises(InvalidRequest):
        instance.adopt(group, instance.kv_layout(group))
    assert_idle(instance)
