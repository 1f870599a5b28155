from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.unit.engine.running import assert_idle, group_of, outputs, prompt_of, run
from tests.unit.engine.test_exactness import ModelOf
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.sampling import probabilities, sample, uniform

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
