"""Predictions for warm requests are accurate, and workers report where their time goes."""

from __future__ import annotations

import re
import time
from statistics import median
from typing import Any

import pytest

from tests.e2e.conftest import Tenant
from tests.support.completions import complete
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e
NUM_WARM = 40
NEAR = 3.0  # times as much, or as little
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


def test_predictions_are_made_measured_and_near(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model()
    prompts = [[(7 * i * (n + 1)) % 251 for i in range(1, 151)] for n in range(NUM_WARM)]
    warm = [
        complete(platform, tenant.key, model, prompt, max_tokens=16, ignore_eos=True)["id"] for prompt in prompts[:-1]
    ]
    last = complete(platform, tenant.key, model, prompts[-1], max_tokens=16, ignore_eos=True)["id"]
    again = complete(platform, tenant.key, model, prompts[-1], max_tokens=16, ignore_eos=True)["id"]
    reports = [report for report in next(platform.views()).workers if report.slot.model == model]  # before it is idle
    assert reports
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
    assert any(report.latency.prefill.num_steps >= 8 for report in reports)
    assert any(report.latency.decode.num_steps >= 8 for report in reports)
    assert all(report.latency.decode.error < 1 and report.latency.prefill.error < 1 for report in reports)
