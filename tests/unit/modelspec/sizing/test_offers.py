"""Operating points within their targets, and offers by price."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.modelspec.sizing.devices import published_devices
from torchrelay.modelspec.sizing.footprint import footprint_of_bytes
from torchrelay.modelspec.sizing.offers import learned_offer, offers
from torchrelay.modelspec.sizing.operating_point import (
    Workload,
    best_point,
    latency_curve,
    operating_point,
    point_at_rate,
)
from torchrelay.modelspec.sizing.roofline import LearnedSteps, LinearCost, Roofline

MODEL = footprint_of_bytes(16e9, 2, 150_000, 8192)
WORK = Workload(5.0, 1024, 256, 0.5, 0.03)
DEVICES = {device.name: device for device in published_devices()}
STEPS = LearnedSteps(LinearCost(0.004, 1e-4, 1e-9), LinearCost(0.004, 2e-4, 1e-8), 512)


def test_a_single_request_is_bound_by_reading_the_weights() -> None:
    device = DEVICES["h100_sxm"]
    floor_s = MODEL.weights_bytes / device.bytes_per_s
    point = operating_point(Roofline(MODEL, device), WORK, 1)
    assert point is not None and floor_s < point.tbt_s < 2 * floor_s
    assert point.tokens_per_s == pytest.approx(1 / point.tbt_s)


@given(st.integers(1, 400), st.integers(1, 4000), st.integers(1, 2000))
def test_an_operating_point_is_a_steady_state(num_choices: int, num_prompt: int, num_answer: int) -> None:
    point = operating_point(STEPS, replace(WORK, num_prompt=num_prompt, num_answer=num_answer), num_choices)
    if point is None:
        return
    assert point.requests_per_s * num_answer == pytest.approx(point.tokens_per_s)
    assert point.requests_per_s * num_prompt * point.tbt_s <= STEPS.token_budget  # the prompts fit into the steps
    assert point.ttft_s > 0


def test_the_best_point_keeps_targets_and_memory() -> None:
    steps = Roofline(MODEL, DEVICES["h100_sxm"])
    best = best_point(steps, WORK, 1e9)
    assert best is not None and best.tbt_s <= WORK.tbt_s and best.ttft_s <= WORK.ttft_s
    following = operating_point(steps, WORK, int(best.num_choices) + 1)
    assert following is None or following.tbt_s > WORK.tbt_s or following.ttft_s > WORK.ttft_s
    small = best_point(steps, WORK, 10 * WORK.num_tokens)
    assert small is not None and small.num_choices == 10
    assert best_point(steps, replace(WORK, tbt_s=0.001), 1e9) is None
    assert best_point(steps, WORK, WORK.num_tokens - 1) is None


def test_the_smallest_batch_keeps_up_with_a_rate() -> None:
    point = point_at_rate(STEPS, WORK, 2.0)
    assert point is not None and point.requests_per_s >= 2.0
    before = operating_point(STEPS, WORK, int(point.num_choices) - 1)
    assert before is not None and before.requests_per_s < 2.0
    assert point_at_rate(STEPS, WORK, 1e6) is None


def test_batches_that_were_never_measured_are_unknown() -> None:
    alone = replace(STEPS, decode=LinearCost(0.004, 0.0, 0.0))
    assert operating_point(alone, WORK, 2) is None
    assert len(list(latency_curve(alone, WORK, 1e9))) == 1
    curve = list(latency_curve(STEPS, WORK, 1e9))
    assert [point.num_choices for point in curve] == sorted({point.num_choices for point in curve})
    assert all(low.tbt_s < high.tbt_s for low, high in itertools.pairwise(curve))


def test_offers_begin_with_the_cheapest_that_meets_the_targets() -> None:
    made = offers(MODEL, published_devices(), WORK)
    meeting = [offer for offer in made if offer.meets]
    assert made[: len(meeting)] == meeting and len(made) == len(published_devices())
    prices = [offer.price or 0.0 for offer in meeting]
    assert prices == sorted(prices)
    for offer in meeting:
        assert offer.at_best is not None and offer.num_instances * offer.at_best.requests_per_s >= WORK.requests_per_s
        assert offer.dollars_per_million == pytest.approx((offer.price or 0.0) / (5 * 1280 * 3600) * 1e6)
    (cpu,) = (offer for offer in made if offer.device == "cpu_16")
    assert cpu.lack.endswith("ms between tokens")


def test_devices_that_are_too_small_compute_together() -> None:
    large = footprint_of_bytes(140e9, 2, 300_000, 8192)
    offer = {each.device: each for each in offers(large, published_devices(), replace(WORK, tbt_s=0.1, ttft_s=3))}
    assert offer["h100_sxm"].num_together > 1
    assert offer["mi300x"].num_together == 1
    assert offer["t4"].lack == "the weights do not fit"


def test_learned_steps_are_measured_and_scaled_ones_estimated() -> None:
    device = replace(DEVICES["l4"], price=None)
    offer = learned_offer(STEPS, MODEL, device, WORK, 1e9)
    assert (offer.origin, offer.price, offer.dollars_per_million) == ("measured", None, None)
    twice = STEPS.of_size(2)
    assert twice.origin == "estimated" and twice.step_s(3, 10) == 2 * STEPS.step_s(3, 10)


def test_cold_starts_are_bound_by_their_slowest_tier() -> None:
    (offer,) = offers(MODEL, [DEVICES["l4"]], WORK)
    times = list(offer.cold_start_s.values())
    assert times == sorted(times) and times[0] < times[-1]
