"""Predictions for warm requests are accurate, and workers report where their time goes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from tests.e2e.conftest import Tenant
from tests.support.completions import complete
from tests.support.platform import Platform
from torchrelay.control.v1.reports_pb2 import WorkerReport

pytestmark = pytest.mark.e2e
NUM_WARM = 40
MIN_STEPS = 8
NEAR = 3.0  # times as much, or as little
PHASES = ("prefill", "decode")
SHARES = ("compute", "memory", "kv_transfer", "io_wait", "scheduling")


def explained(platform: Platform, request_id: str) -> dict[str, str]:
    """The reasons of a request's decisions by kind, once the scheduler has its release."""
    deadline = time.monotonic() + 30
    with platform.admin() as admin:
        while True:
            found: dict[str, Any] = admin.call("GET", f"/v1/requests/{request_id}/explain")
            reasons = {one["kind"]: one["reason"] for one in found["decisions"]}
            if "predict" in reasons:
                return reasons
            assert time.monotonic() < deadline, f"no prediction was compared: {reasons}"
            time.sleep(0.02)


def in_ms(reason: str, what: str) -> tuple[float, float]:
    """Predicted and measured."""
    found = re.search(rf"{what} predicted ([\d.]+) ms, measured ([\d.]+) ms", reason)
    assert found is not None, reason
    return float(found[1]), float(found[2])


def assert_near(reasons: list[str]) -> None:
    """Other programs delay single requests, here by three times what they take: medians are compared."""
    for what in ("first token", "between tokens"):
        predicted_ms, measured_ms = (median(each) for each in zip(*(in_ms(one, what) for one in reasons), strict=True))
        assert measured_ms / NEAR < predicted_ms < measured_ms * NEAR, f"{what}: {reasons}"


def learned_from(platform: Platform, model: str, completed: Callable[[int], str]) -> list[WorkerReport]:
    """The reports of the model's workers, after more requests if its costs were learned from few steps.

    Workers learn from one step in each 10 ms of steps, so the faster the machine, the more requests that takes.
    """
    deadline = time.monotonic() + 60
    num_sent = NUM_WARM + 1
    while True:
        reports = [report for report in next(platform.views()).workers if report.slot.model == model]
        latencies = [report.latency for report in reports]
        num_steps = [max((getattr(one, phase).num_steps for one in latencies), default=0) for phase in PHASES]
        if min(num_steps) >= MIN_STEPS:
            return reports
        assert time.monotonic() < deadline, f"learned from {num_steps} steps with {num_sent} requests"
        completed(num_sent)
        num_sent += 1


def test_predictions_are_made_measured_and_near(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model()

    def completed(n: int) -> str:
        prompt = [(7 * i * (n + 1)) % 251 for i in range(1, 151)]
        return str(complete(platform, tenant.key, model, prompt, max_tokens=16, ignore_eos=True)["id"])

    warm = [completed(n) for n in range(NUM_WARM)]
    last, again = completed(NUM_WARM), completed(NUM_WARM)
    reports = learned_from(platform, model, completed)
    for request_id in (last, again):
        reason = explained(platform, request_id)["predict"]
        for what in ("first token", "between tokens"):
            predicted_ms, measured_ms = in_ms(reason, what)
            assert predicted_ms < measured_ms + 20 and measured_ms < predicted_ms + 100, reason
    assert_near([explained(platform, request_id)["predict"] for request_id in warm[NUM_WARM // 2 :]])
    assert "128 tokens expected in the cache" in explained(platform, again)["predict"]
    for report in reports:
        assert sum(getattr(report.profile, share) for share in SHARES) == pytest.approx(1.0)
        assert report.profile.bottleneck in SHARES
        assert report.device == "cpu" and report.has_prefix_cache
    assert all(report.latency.decode.error < 1 and report.latency.prefill.error < 1 for report in reports)
