"""Steps of both kinds are learned apart, and prompts and tokens predicted from them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.latency.latency_model import LatencyFit, LatencyModel, StepCost, StepWork, attended_positions

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
