"""Metrics of requests, read from the SDK as an exporter would."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.support.wait import eventually
from tests.unit.gateway.token_path_rig import MakeRig
from torchrelay.control.v1 import scheduler_pb2

MODEL = "acme/echo"
GEN_AI = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "torchrelay"}


async def test_outcomes_tokens_and_times_are_counted(make_rig: MakeRig) -> None:
    reader = InMemoryMetricReader()
    rig = await make_rig(meter=MeterProvider(metric_readers=[reader]).get_meter("test"))
    body = {"model": "echo", "prompt": [5, 6, 7], "max_tokens": 4}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    rig.scheduler.refusals.append(scheduler_pb2.Refusal(reason=scheduler_pb2.Refusal.REASON_QUEUE_FULL))
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 429
    for name in ("absent", "invented"):
        assert (await rig.http.post("/v1/completions", json={**body, "model": name})).status_code == 404
    await eventually(lambda: not rig.ports.reserved)
    points = collected(reader)
    own = {
        (name.removeprefix("torchrelay_gateway_"), *(point.attributes or {}).values()): getattr(point, "value", None)
        for name, of_name in points.items()
        if not name.startswith("gen_ai.")
        for point in of_name
    }
    assert own == {
        ("requests", MODEL, "ok"): 1,
        ("requests", MODEL, "queue_full"): 1,
        ("requests", "", "model_not_found"): 2,
        ("tokens", MODEL, "prompt"): 3,
        ("tokens", MODEL, "cached"): 0,
        ("tokens", MODEL, "output"): 4,
        ("choices", MODEL, "length"): 1,
        ("billed_dollars", MODEL): 4e-9,
        ("requests_running",): 0,
        ("ledger_writes_pending",): 0,
        ("prompts", "ok"): 1,  # for the tokenizer alone: these prompts are token ids
        ("prompt_wait",): None,
        ("text_processes",): 1,
    }
    assert {name for name in points if name.startswith("gen_ai.")} == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.client.token.usage",
    }
    with_model = {**GEN_AI, "gen_ai.request.model": MODEL}
    ended = {
        frozenset((point.attributes or {}).items()): point.count for point in points["gen_ai.server.request.duration"]
    }
    assert ended == {
        frozenset(with_model.items()): 1,
        frozenset({**with_model, "error.type": "queue_full"}.items()): 1,
        frozenset({**GEN_AI, "error.type": "model_not_found"}.items()): 2,
    }
    for name in ("gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"):
        (point,) = points[name]
        assert (point.count, point.attributes) == (1, with_model)
    usage = {(point.attributes or {})["gen_ai.token.type"]: point.sum for point in points["gen_ai.client.token.usage"]}
    assert usage == {"input": 3, "output": 4}


def collected(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """Data points by the name of their metric."""
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: list(metric.data.data_points) for metric in metrics}
