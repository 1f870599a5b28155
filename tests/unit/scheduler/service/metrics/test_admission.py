"""Prediction errors, measured."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from torchrelay.common.process.telemetry import BUCKETS_S
from torchrelay.scheduler.policy.core import AttemptKey, Placement, WorkerRef
from torchrelay.scheduler.policy.prediction import Outcome, Prediction
from torchrelay.scheduler.service.metrics.admission import AdmissionMetrics


def test_predictions_that_hoped_too_little_count_as_those_that_hoped_too_much() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    counted = AdmissionMetrics(provider.get_meter("test"), lambda: 0, lambda: 0)
    seat = WorkerRef("w1", "10.0.0.1:1", "i-1")
    placement = Placement(AttemptKey("r1", 1), seat, seat, False, Prediction(0.2, 0.1, 0.02))
    counted.record_accuracy(placement, Outcome(ttft_s=0.3, tbt_s=0.021, ended_at=11.0))
    counted.record_accuracy(placement, Outcome(ttft_s=0.1, tbt_s=0.019, ended_at=11.0))
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, Any] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        (found[metric.name],) = metric.data.data_points
    first, between = (
        found["torchrelay_scheduler_ttft_prediction_error"],
        found["torchrelay_scheduler_tbt_prediction_error"],
    )
    assert (first.count, first.sum) == (2, pytest.approx(0.2))
    assert (between.count, between.sum) == (2, pytest.approx(0.002))
    assert first.explicit_bounds == BUCKETS_S
    provider.shutdown()
