"""Every sampler against its definition in plain numpy: fp64, one row at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchrelay.engine.core import NO_TOKEN, ChoiceSpec, Finish, GroupSpec, SamplingParams
from torchrelay.engine.sampling import distributions
from torchrelay.engine.sampling.distributions import apply_biases_and_penalties, draw_by_cdf, probabilities
from torchrelay.engine.sampling.sampler import TokenDraw, sample_tokens

Row = npt.NDArray[np.float64]
LOGITS = [0.3, 2.0, -1.0, 1.2, 2.4, -math.inf, 0.0, 1.9]
COUNTS = {4: 3, 1: 1, 7: 1}
NUM_DRAWS = 6400


def definition(logits: Sequence[float], params: SamplingParams, counts: dict[int, int]) -> Row:
    """What the API promises: the probability of every token."""
    scores = np.array(logits, np.float64)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token, count in counts.items():
        scores[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    weights: Row = np.exp((scores - scores.max()) / params.temperature)
    found: Row = weights / weights.sum()
    if params.top_k:
        found[found < np.sort(found)[::-1][min(params.top_k, len(found)) - 1]] = 0
        found /= found.sum()
    if params.top_p < 1:
        order = np.argsort(-found, kind="stable")
        num_kept = int(np.searchsorted(np.cumsum(found[order]), params.top_p)) + 1
        found[order[num_kept:]] = 0
        found /= found.sum()
    found[found < params.min_p * found.max()] = 0
    found /= found.sum()
    return found


def chi_square_is_likely(found: Counter[int], wanted: Row, num_draws: int) -> bool:
    """Whether counts like these come by chance more often than once in a thousand; tokens too rare to test are pooled.

    The bound is the 0.999 quantile of chi-square by Wilson and Hilferty's approximation (1931), good to a percent.
    """
    if any(wanted[token] == 0 for token in found):
        return False
    expected = wanted * num_draws
    cells = [(found[token], count) for token, count in enumerate(expected) if count >= 5]
    rare = [token for token, count in enumerate(expected) if 0 < count < 5]
    if rare:
        cells.append((sum(found[token] for token in rare), float(sum(expected[token] for token in rare))))
    freedom = len(cells) - 1
    statistic = sum((seen - count) ** 2 / count for seen, count in cells)
    bound = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    return bool(statistic < bound)


def draw_of(params: SamplingParams, row: int = 0, position: int = 0, counts: dict[int, int] | None = None) -> TokenDraw:
    group = GroupSpec("r/0", (1,), 1, replace(params, max_tokens=10**6), (ChoiceSpec(0),))
    return TokenDraw(row, group, 0, position, counts)


def drawn(logits: Sequence[float], params: SamplingParams, counts: dict[int, int] | None = None) -> Counter[int]:
    """Tokens of ``NUM_DRAWS`` positions of one seed, sampled 64 at once."""
    rows = torch.tensor([logits]).expand(64, -1)
    found: Counter[int] = Counter()
    for begin in range(0, NUM_DRAWS, 64):
        draws = [draw_of(params, row, begin + row, counts) for row in range(64)]
        found.update(token.token_id for token in sample_tokens(rows, draws))
    return found


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 3, "temperature": 1.3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8, "temperature": 0.9},
    {"top_k": 6, "top_p": 0.95, "min_p": 0.05},
    {"logit_bias": ((0, 2.0), (4, -3.0))},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.0, "frequency_penalty": 2.0, "logit_bias": ((4, 3.0),), "temperature": 0.8},
    {"presence_penalty": 0.5, "frequency_penalty": 0.22, "logit_bias": ((2, 4.0),), "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("settings", SAMPLERS, ids=lambda settings: "-".join(settings))
def test_frequencies_fit_the_definition(settings: dict[str, Any]) -> None:
    params = SamplingParams(seed=len(str(settings)), **settings)
    counts = COUNTS if params.penalised else None
    wanted = definition(LOGITS, params, counts or {})
    found = drawn(LOGITS, params, counts)
    assert chi_square_is_likely(found, wanted, NUM_DRAWS)


def test_the_chi_square_test_sees_a_wrong_sampler() -> None:
    """Frequencies of one sampler do not pass for those of a similar one."""
    found = drawn(LOGITS, SamplingParams(temperature=1.0, seed=3))
    for other in (SamplingParams(temperature=0.9), SamplingParams(logit_bias=((1, 0.15),)), SamplingParams(top_k=6)):
        assert not chi_square_is_likely(found, definition(LOGITS, other, {}), NUM_DRAWS)


@pytest.mark.parametrize("top_p", [0.5, 0.93, 0.999])
def test_a_nucleus_wider_than_the_first_look_is_found_whole(top_p: float) -> None:
    """Nearly flat over 3,000 tokens: more than are ordered at first."""
    logits = np.random.default_rng(4).normal(0, 0.5, 3000)
    params = SamplingParams(top_p=top_p)
    wanted = definition(logits.tolist(), params, {})
    found = probabilities(torch.tensor(logits, dtype=torch.float32)[None].clone(), [params])[0].double().numpy()
    assert (wanted > 0).sum() > distributions._NUM_ORDERED
    assert abs(int((found > 0).sum()) - int((wanted > 0).sum())) <= 1  # fp32 sums, at the border
    assert np.allclose(found / found.sum(), wanted, atol=1e-5)


def test_rows_of_one_batch_each_have_their_own_treatment() -> None:
    """Fifty rows with settings of their own: each as if alone, in tokens and in distribution."""
    random = np.random.default_rng(9)
    logits = torch.tensor(random.normal(0, 3, (50, 700)), dtype=torch.float32)
    params = [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.5, 1.0, 1.7])),
            top_k=int(random.choice([0, 1, 20, 600, 5000])),
            top_p=float(random.choice([1.0, 0.2, 0.9, 0.999])),
            min_p=float(random.choice([0.0, 0.01, 0.3])),
            presence_penalty=float(random.choice([0.0, 1.0])),
            logit_bias=((3, 5.0),) if row % 3 == 0 else (),
            top_logprobs=row % 4 or None,
            seed=row,
        )
        for row in range(50)
    ]
    draws = [draw_of(one, row, row, {row: 2}) for row, one in enumerate(params)]
    together = sample_tokens(logits, draws)
    assert together == [sample_tokens(logits, [draw])[0] for draw in draws]
    for row, one in enumerate(params):
        if not one.greedy:
            wanted = definition(logits[row].tolist(), one, {row: 2})
            found = (
                probabilities(apply_biases_and_penalties(logits[row : row + 1].clone(), [one], [{row: 2}]), [one])[0]
                .double()
                .numpy()
            )
            assert np.allclose(found / found.sum(), wanted, atol=1e-5), (row, one)
            assert wanted[together[row].token_id] > 0
        else:
            assert together[row].token_id == int(
                apply_biases_and_penalties(logits[row : row + 1].clone(), [one], [{row: 2}]).argmax()
            )


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, {4}),
        ({"top_k": 3}, {1, 4, 7}),
        ({"top_k": 100}, set(range(8)) - {5}),
        ({"top_p": 0.0}, {4}),
        ({"top_p": 0.7}, {1, 4, 7}),  # of e^2.4, e^2.0, e^1.9, ...: 0.36, 0.24, 0.22, 0.11: the third one passes 0.7
        ({"top_k": 2, "top_p": 0.99}, {1, 4}),
        ({"min_p": 0.65}, {1, 4}),  # e^-0.4, e^-0.5 and e^-1.2 of the most likely are 0.67, 0.61 and 0.30
        ({"min_p": 0.2}, {1, 3, 4, 7}),
        ({"min_p": 1.0}, {4}),
    ],
)
def test_what_is_cut_away_and_what_stays(settings: dict[str, float], kept: set[int]) -> None:
    found = probabilities(torch.tensor([LOGITS]), [SamplingParams(**settings)])  # type: ignore[arg-type]
    assert set(found[0].nonzero().flatten().tolist()) == kept


def test_ties_at_a_border_all_stay() -> None:
    logits = [1.0, 3.0, 3.0, 3.0, 0.0]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.4), SamplingParams(min_p=1.0)):
        found = probabilities(torch.tensor([logits]), [params])
        assert found[0].nonzero().flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("vocab_size", [4, 32, 33, 200])
def test_the_ends_of_the_range_give_possible_tokens(number: float, vocab_size: int) -> None:
    found = torch.zeros(1, vocab_size)
    found[0, 1] = found[0, vocab_size - 2] = 0.5
    assert draw_by_cdf(found, [number]).tolist() == [1 if number == 0 else vocab_size - 2]


def test_temperatures_down_to_zero_give_the_most_likely() -> None:
    for temperature in (0.0, 1e-300, 1e-6, 2e-5):
        assert set(drawn(LOGITS, SamplingParams(temperature=temperature))) == {4}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_is_not_finite_ends_its_draws_and_no_others(broken: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([LOGITS, LOGITS, LOGITS], dtype=dtype)
    logits[1, 2] = broken
    settings = (SamplingParams(temperature=0), SamplingParams(top_logprobs=2), SamplingParams(logit_bias=((1, 9.0),)))
    for params in settings:
        first, second, third = sample_tokens(logits, [draw_of(params, row, 5) for row in range(3)])
        assert (second.token_id, second.finish, second.logprobs) == (NO_TOKEN, Finish.NOT_FINITE, None)
        assert first == third and first.token_id >= 0 and first.finish is None


def test_a_row_of_nothing_but_minus_infinity_is_not_finite() -> None:
    (token,) = sample_tokens(torch.full((1, 8), -torch.inf), [draw_of(SamplingParams())])
    assert token.finish is Finish.NOT_FINITE
