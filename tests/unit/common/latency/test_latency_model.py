"""Costs are learned from steps and followed when they change; prompts and tokens are predicted from them."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrelay.common.latency.latency_model import LatencyFit, LatencyModel, StepCost, StepWork, attended_positions
from torchrelay.common.latency.online_fit import OnlineFit, least_squares

PREFILL = StepCost(0.01, 1e-4, 2e-8, num_steps=1)
DECODE = StepCost(0.008, 5e-4, 1e-6, num_steps=1)
BUDGET = 512


def test_attended_positions_include_own() -> None:
    assert attended_positions(0, 3) == 1 + 2 + 3
    assert attended_positions(3, 5) == 4 + 5
    assert attended_positions(7, 7) == 0


def learned(seed: int = 1) -> LatencyModel:
    """From chunks of prompts alone, decoding alone, and both in one step."""
    rng, fit = random.Random(seed), LatencyFit(BUDGET)
    for _ in range(600):
        begin, size, batch = rng.randint(0, 2000), rng.randint(1, BUDGET), rng.randint(1, 32)
        seen = batch * rng.randint(10, 2000)
        prefills, decodes = rng.choice([(True, False), (False, True), (True, True)])
        work = StepWork(
            size * prefills, attended_positions(begin, begin + size) * prefills, batch * decodes, seen * decodes
        )
        step_s = DECODE.step_s(batch, seen)
        if prefills:
            step_s = PREFILL.step_s(size, work.num_prefill_attended) + decodes * DECODE.marginal_s(batch, seen)
        fit.observe(work, step_s * rng.uniform(0.97, 1.03))
    return fit.model


def test_mixed_steps_teach_both_costs() -> None:
    model, true = learned(), LatencyModel(PREFILL, DECODE, BUDGET)
    for tokens, cached in ((1, 0), (64, 0), (500, 448), (3000, 0), (3000, 2900)):
        assert model.prefill_s(tokens, cached) == pytest.approx(true.prefill_s(tokens, cached), rel=0.06)
    for batch, seen in ((1, 100), (8, 800), (32, 40_000)):
        assert model.tbt_s(batch, seen) == pytest.approx(true.tbt_s(batch, seen), rel=0.06)
    assert model.prefill.error < 0.05 and model.decode.error < 0.05


def test_long_prompt_costs_each_step_and_context() -> None:
    model = LatencyModel(PREFILL, DECODE, BUDGET)
    assert model.prefill_s(1024) == pytest.approx(2 * 0.01 + 1024e-4 + attended_positions(0, 1024) * 2e-8)
    assert model.prefill_s(1024, 960) == pytest.approx(0.01 + 64e-4 + attended_positions(960, 1024) * 2e-8)


def test_short_prompts_share_steps() -> None:
    model = LatencyModel(PREFILL, DECODE, BUDGET)
    assert model.queued_s(16 * 32) == pytest.approx(0.01 + 512e-4)
    assert model.queued_s(1024, attended_positions(0, 1024)) == pytest.approx(model.prefill_s(1024))
    assert model.queued_s(0) == 0


def test_fully_cached_prompt_costs_one_position() -> None:
    model = LatencyModel(PREFILL, DECODE, BUDGET)
    assert model.prefill_s(64, 64) == pytest.approx(PREFILL.step_s(1, 64))


def test_concurrent_decoding_slows_prefill() -> None:
    model = LatencyModel(PREFILL, DECODE, BUDGET)
    assert model.prefill_s(512, 0, 16, 16_000) == pytest.approx(
        2 * (0.01 + DECODE.marginal_s(16, 16_000)) + 512e-4 + attended_positions(0, 512) * 2e-8
    )


def test_mixed_steps_need_decode_cost_first() -> None:
    fit = LatencyFit(BUDGET)
    assert not fit.model.prefill.known and not fit.model.decode.known
    fit.observe(StepWork(100, 5050, 4, 400), 0.05)
    fit.observe(StepWork(), 0.05)
    fit.observe(StepWork(num_decoding=1, num_decode_attended=10), 0.0)
    assert not fit.model.prefill.known and not fit.model.decode.known
    fit.observe(StepWork(num_decoding=1, num_decode_attended=10), 0.01)
    fit.observe(StepWork(100, 5050, 4, 400), 0.05)
    assert fit.model.prefill.num_steps == fit.model.decode.num_steps == 1


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 100), st.integers(0, 100_000))
def test_more_cached_is_never_slower(tokens: int, cached: int, batch: int, seen: int) -> None:
    model = LatencyModel(PREFILL, DECODE, BUDGET)
    cached = min(cached, tokens)
    assert 0 < model.prefill_s(tokens, cached, batch, seen) <= model.prefill_s(tokens, 0, batch, seen) + 1e-12


SHAPE = (1.0, 1 / 8, 1 / 8192)
Amounts = tuple[float, float, float]


def steps(rng: random.Random, count: int, max_batch: int = 32) -> list[Amounts]:
    batches = [rng.randint(1, max_batch) for _ in range(count)]
    return [(1.0, batch, batch * rng.randint(10, 2000)) for batch in batches]


def taken(costs: tuple[float, ...], amounts: Amounts) -> float:
    return sum(cost * amount for cost, amount in zip(costs, amounts, strict=True))


def trained(costs: tuple[float, ...], seed: int = 1, count: int = 400, noise: float = 0.05) -> OnlineFit:
    rng, fit = random.Random(seed), OnlineFit(SHAPE)
    for amounts in steps(rng, count):
        fit.observe(amounts, taken(costs, amounts) * rng.uniform(1 - noise, 1 + noise))
    return fit


@settings(max_examples=40)
@given(st.floats(1e-4, 1.0), st.floats(0.01, 0.5), st.floats(1e-5, 1e-3), st.floats(0, 0.1), st.integers(0, 1_000_000))
@example(base=1.0, row=0.03125, seen=0.0009772477518439845, noise=0.0, seed=1584)  # short steps are few among long ones
def test_costs_are_recovered_from_noisy_steps(base: float, row: float, seen: float, noise: float, seed: int) -> None:
    costs = (base, base * row, base * seen)
    fit = trained(costs, seed, noise=noise)
    for amounts in steps(random.Random(seed + 1), 50):
        assert fit.predict(amounts) == pytest.approx(taken(costs, amounts), rel=0.03 + noise)
    assert fit.error <= 0.01 + noise


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4000), st.floats(1e-6, 100)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_costs_and_predictions_are_never_negative(seen: list[tuple[int, int, float]]) -> None:
    fit = OnlineFit(SHAPE)
    for batch, context, measured in seen:
        fit.observe((1, batch, batch * context), measured)
        assert min(fit.costs) >= 0
        assert fit.predict((1, 1, 1)) >= 0 and fit.predict((1, 64, 64 * 4000)) > 0
        assert 0 <= fit.error <= 1


def test_extreme_steps_keep_fit_finite() -> None:
    """A cost of the context alone, learned first, foretells nearly nothing of a step without one."""
    fit = OnlineFit(SHAPE, window=32)
    for amounts, measured in (((1, 93, 12_189_696), 1e3), ((1, 1, 0), 9e-8), ((1, 1, 100), 2.5e-7), ((1, 1, 0), 1e-9)):
        fit.observe(amounts, measured)
        assert all(math.isfinite(cost) and cost >= 0 for cost in fit.costs)


def test_first_step_sets_scale() -> None:
    fit = OnlineFit(SHAPE)
    fit.observe((1, 1, 100), 0.01)
    assert fit.predict((1, 1, 100)) == pytest.approx(0.01)
    assert 0.01 < fit.predict((1, 8, 800)) < 0.08, "eight choices cost more than one, and less than eight steps"


def test_fit_follows_lasting_slowdown() -> None:
    costs, slow, rng = (0.005, 5e-4, 1e-6), (0.015, 15e-4, 3e-6), random.Random(3)
    fit = trained(costs)
    for amounts in steps(rng, 300):
        fit.observe(amounts, taken(slow, amounts) * rng.uniform(0.95, 1.05))
    for amounts in steps(rng, 20):
        assert fit.predict(amounts) == pytest.approx(taken(slow, amounts), rel=0.15)


@pytest.mark.parametrize("seed", range(4))
def test_fit_learns_median_step(seed: int) -> None:
    """Where cores are shared a third of all steps is interrupted, each for another time: their mean is what hardly any
    step takes.
    """
    costs, rng = (0.005, 5e-4, 1e-6), random.Random(seed)
    fit = OnlineFit(SHAPE)
    for amounts in steps(rng, 400):
        interrupted = rng.expovariate(1 / 0.8) if rng.random() < 0.35 else 0.0
        fit.observe(amounts, taken(costs, amounts) * rng.uniform(0.95, 1.05) * (1 + interrupted))
    errors = [fit.predict(amounts) / taken(costs, amounts) for amounts in steps(rng, 100)]
    assert 0.95 < median(errors) < 1.1


def test_batch_cost_survives_single_requests() -> None:
    costs, rng = (0.005, 5e-4, 1e-6), random.Random(5)
    fit = trained(costs)
    for amounts in steps(rng, 5000, max_batch=1):
        fit.observe(amounts, taken(costs, amounts) * rng.uniform(0.95, 1.05))
    assert fit.predict((1, 32, 32_000)) == pytest.approx(taken(costs, (1, 32, 32_000)), rel=0.1)


@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=3, max_size=6),
    st.lists(st.floats(-3, 3), min_size=3, max_size=3),
)
@settings(deadline=None)
def test_least_squares_meets_optimality_conditions(rows: list[list[float]], vector: list[float]) -> None:
    matrix = [[sum(row[i] * row[j] for row in rows) + 0.1 * (i == j) for j in range(3)] for i in range(3)]
    minimum = least_squares(matrix, vector)
    slope = [sum(a * x for a, x in zip(row, minimum, strict=True)) - b for row, b in zip(matrix, vector, strict=True)]
    for x, rise in zip(minimum, slope, strict=True):
        assert x >= 0
        assert rise == pytest.approx(0, abs=1e-6) if x else rise >= -1e-6
