"""Predictions for warm requests are accurate, and workers report where their time goes."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from tests.e2e.tenants import Tenant
from tests.support.completions import complete, headers
from tests.support.http import http
from tests.support.platform import Platform
from tests.support.wait import wait_until
from torchrelay.control.v1.reports_pb2 import WorkerReport

pytestmark = pytest.mark.e2e
NUM_WARM = 40
MIN_STEPS = 8
NEAR = 10.0  # times as much, or as little; bench/prediction.py measures the error
PHASES = ("prefill", "decode")
SHARES = ("compute", "memory", "kv_transfer", "io_wait", "scheduling")


def explained(platform: Platform, request_id: str) -> dict[str, str]:
    """The reasons of a request's decisions by kind, once the scheduler has its release."""
    reasons: dict[str, str] = {}

    def is_compared() -> bool:
        explained: dict[str, Any] = admin.call("GET", f"/v1/requests/{request_id}/explain")
        reasons.update({decision["kind"]: decision["reason"] for decision in explained["decisions"]})
        return "predict" in reasons

    with platform.admin() as admin:
        wait_until(is_compared, "the comparison of the prediction")
    return reasons


def in_ms(reason: str, what: str) -> tuple[float, float]:
    """Predicted and measured."""
    match = re.search(rf"{what} predicted ([\d.]+) ms, measured ([\d.]+) ms", reason)
    assert match is not None, reason
    return float(match[1]), float(match[2])


def assert_near(reasons: list[str]) -> None:
    """Compares medians, since other programs delay single requests."""
    for what in ("first token", "between tokens"):
        predicted_ms, measured_ms = (
            median(each) for each in zip(*(in_ms(reason, what) for reason in reasons), strict=True)
        )
        assert measured_ms / NEAR < predicted_ms < measured_ms * NEAR, f"{what}: {reasons}"


def learned_from(platform: Platform, version_id: str, completed: Callable[[int], str]) -> list[WorkerReport]:
    """The reports of the version's workers, after more requests if its costs were learned from few steps.

    A slot names one of the models that have its version, perhaps another tenant's.

    Workers learn from one step in each 10 ms of steps, so the faster the machine, the more requests that takes.
    """
    for num_sent in range(NUM_WARM + 1, 20 * NUM_WARM):
        reports = [report for report in next(platform.views()).workers if report.slot.version_id == version_id]
        latencies = [report.latency for report in reports]
        num_steps = [max((getattr(latency, phase).num_steps for latency in latencies), default=0) for phase in PHASES]
        if min(num_steps) >= MIN_STEPS:
            return reports
        completed(num_sent)
    raise AssertionError(f"the workers learned from {num_steps} steps only")


def test_predictions_are_near_the_measurements(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model()

    def completed(n: int) -> str:
        prompt = [(7 * i * (n + 1)) % 251 for i in range(1, 151)]
        return str(complete(platform, tenant.key, model, prompt, max_tokens=16, ignore_eos=True)["id"])

    warm = [completed(n) for n in range(NUM_WARM)]
    last, again = completed(NUM_WARM), completed(NUM_WARM)
    described = http.get(f"{platform.http}/v1/models/{model}", headers=headers(tenant.key)).json()
    reports = learned_from(platform, described["version"], completed)
    for request_id in (last, again):
        for what in ("first token", "between tokens"):
            predicted_ms, _ = in_ms(explained(platform, request_id)["predict"], what)
            assert predicted_ms > 0
    assert_near([explained(platform, request_id)["predict"] for request_id in warm[NUM_WARM // 2 :]])
    assert "128 tokens expected in the cache" in explained(platform, again)["predict"]
    for report in reports:
        assert sum(getattr(report.profile, share) for share in SHARES) == pytest.approx(1.0)
        assert report.profile.bottleneck in SHARES
        assert report.device == "cpu" and report.has_prefix_cache
    assert all(report.latency.decode.error < 1 and report.latency.prefill.error < 1 for report in reports)
