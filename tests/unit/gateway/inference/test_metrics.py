"""Metrics of requests, read from the SDK as an exporter would."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.support.wait import eventually
from tests.unit.gateway.token_path_rig import MakeRig
from torchrelay.control.v1 import scheduler_pb2


async def test_outcomes_tokens_and_times_are_counted(make_rig: MakeRig) -> None:
    reader = InMemoryMetricReader()
    rig = await make_rig(meter=MeterProvider(metric_readers=[reader]).get_meter("test"))
    body = {"model": "echo", "prompt": [5, 6, 7], "max_tokens": 4}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    rig.scheduler.refusals.append(scheduler_pb2.Refusal(reason=scheduler_pb2.Refusal.REASON_QUEUE_FULL))
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 429
    assert (await rig.http.post("/v1/completions", json={**body, "model": "absent"})).status_code == 404
    await eventually(lambda: not rig.ports.reserved)
    data = reader.get_metrics_data()
    assert data is not None
    points = {
        (metric.name.removeprefix("torchrelay_gateway_"), *(point.attributes or {}).values()): point
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    values = {name: getattr(point, "value", None) for name, point in points.items()}
    assert values == {
        ("requests", "ok"): 1,
        ("requests", "queue_full"): 1,
        ("requests", "model_not_found"): 1,
        ("tokens", "prompt"): 3,
        ("tokens", "cached"): 0,
        ("tokens", "output"): 4,
        ("ttft",): None,
        ("requests_running",): 0,
        ("ledger_writes_pending",): 0,
        ("prompts", "ok"): 1,  # for the tokenizer alone: these prompts are token ids
        ("prompt_wait",): None,
        ("text_processes",): 1,
    }
    assert getattr(points["ttft",], "count", None) == 1
