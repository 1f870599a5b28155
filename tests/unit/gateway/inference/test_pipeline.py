"""Deadlines of requests, by setting or gRPC call, in every state; what an admission carries; metrics of requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.support.echo_worker import EchoWorker
from tests.support.gateway_ports import PRINCIPAL, published_model
from tests.support.wait import eventually
from tests.unit.gateway.dialects.all_dialects import METADATA, inference_stub
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.tokens.prefix_hashes import page_hashes
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import FinishCause, LatencyTargets, ServiceClass
from torchrelay.gateway.inference.execution.attempt import model_version
from torchrelay.gateway.inference.pipeline import earlier_deadline
from torchrelay.inference.v1 import inference_pb2 as pb

TIMEOUT_S = 1.0
GRPC_REQUEST = pb.GenerateRequest(model="echo", prompt_token_ids=pb.TokenIds(ids=PROMPT), max_tokens=6)


async def load_tokenizer(rig: TokenPathRig) -> None:
    """Sends a request for the time that a first one takes, which may exceed the deadline."""
    await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 2})
    await eventually(lambda: not rig.ports.reserved)
    rig.ports.settled.clear()
    for worker in rig.workers:
        worker.starts.clear()


def deadlines(rig: TokenPathRig) -> set[int]:
    return {start.deadline_unix_ms for worker in rig.workers for _, start in worker.starts}


async def test_running_request_past_its_deadline_frees_its_worker(make_rig: MakeRig) -> None:
    rig = await make_rig(request_timeout_s=TIMEOUT_S)
    await load_tokenizer(rig)
    rig.workers[0].pause_at = 3
    began = time.time()
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT, "max_tokens": 9})
    ended = time.time()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    await eventually(lambda: rig.workers[0].num_running == 0 and not rig.ports.reserved)
    assert [(usage.num_output_tokens, usage.cause) for usages in rig.ports.settled.values() for usage in usages] == [
        (3, FinishCause.ERROR)
    ]
    (deadline_ms,) = deadlines(rig)  # sent to both roles: a worker enforces it even without the gateway
    assert began + TIMEOUT_S - 0.1 <= deadline_ms / 1000 <= ended


async def test_waiting_request_past_its_deadline_is_withdrawn(make_rig: MakeRig) -> None:
    rig = await make_rig(request_timeout_s=0.2)
    rig.scheduler.open_gate.clear()
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": PROMPT})
    assert response.status_code == 504
    await eventually(lambda: len(rig.scheduler.withdrawals) == 1 and not rig.ports.reserved)


async def test_grpc_deadline_reaches_the_workers(rig: TokenPathRig) -> None:
    async with inference_stub(rig) as stub:
        assert [event async for event in stub.Generate(GRPC_REQUEST, metadata=METADATA)]
        assert deadlines(rig) == {0}, "no deadline is none"
        rig.workers[0].starts.clear()
        began = time.time()
        assert [event async for event in stub.Generate(GRPC_REQUEST, metadata=METADATA, timeout=60)]
        (deadline_ms,) = deadlines(rig)
        assert began + 59 <= deadline_ms / 1000 <= time.time() + 61


async def test_earlier_of_two_deadlines_counts(make_rig: MakeRig) -> None:
    rig = await make_rig(request_timeout_s=TIMEOUT_S)
    await load_tokenizer(rig)
    rig.workers[0].pause_at = 3
    async with inference_stub(rig) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert [event async for event in stub.Generate(GRPC_REQUEST, metadata=METADATA, timeout=60)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "exceeded its deadline" in (caught.value.details() or "")
    (deadline_ms,) = deadlines(rig)
    assert deadline_ms / 1000 < time.time() + 1


def test_earlier_deadline_and_its_owner() -> None:
    for callers_s, operators_s, expected in (
        (None, 0.0, (0, False)),
        (None, 5.0, (5_000_100, False)),
        (3.0, 0.0, (3_000_100, True)),
        (3.0, 5.0, (3_000_100, True)),
        (7.0, 5.0, (5_000_100, False)),
        (5.0, 5.0, (5_000_100, False)),
        (0.0, 5.0, (100, True)),
    ):
        assert earlier_deadline(100, callers_s, operators_s) == expected, (callers_s, operators_s)


async def test_admission_has_the_page_keys_of_the_tenant_and_the_age(rig: TokenPathRig) -> None:
    """The block hashes of a prompt are the engine's page keys."""
    prompt, begin = [40 + number % 50 for number in range(150)], time.monotonic()
    body = {"model": "echo", "prompt": prompt, "max_tokens": 1}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    [admit] = rig.scheduler.admits
    assert list(admit.block_hashes) == list(page_hashes(PRINCIPAL.tenant_id, prompt))[3::4]
    assert len(admit.block_hashes) == 2
    assert admit.age_ms <= (time.monotonic() - begin) * 1000


def test_model_version_carries_the_latency_targets() -> None:
    model = published_model("acme/m", file_digests={})
    assert not model_version(model).targets.ListFields()
    targets = model_version(replace(model, targets=LatencyTargets(0.2, 0.5, 60.0, 0.05))).targets
    assert (targets.interactive_ttft_s, targets.standard_ttft_s, targets.batch_ttft_s) == (0.2, 0.5, 60.0)
    assert targets.tbt_target_s == 0.05


def test_the_engine_that_a_version_needs_comes_first() -> None:
    for engine, changes, needed in (
        ("auto", {}, ("", 1)),
        ("vllm", {}, ("vllm", 1)),
        ("vllm:2", {}, ("vllm", 2)),
        ("auto", {"dtype": "I8"}, ("torchrelay", 1)),
        ("vllm:2", {"base_version_id": "v-base"}, ("torchrelay", 1)),
        ("torchrelay", {"dtype": "I8", "engine": "vllm"}, ("vllm", 1)),
        ("vllm:2", {"dtype": "I4", "engine": "vllm"}, ("vllm", 2)),
    ):
        model = published_model("acme/m", file_digests={})
        version = replace(model.version, **changes)  # type: ignore[arg-type]
        scaling = model_version(replace(model, engine=engine, version=version)).scaling
        assert (scaling.engine, scaling.num_devices) == needed


def test_service_class_numbers_match_the_protocol() -> None:
    assert {f"SERVICE_CLASS_{kind.name}": kind.value for kind in ServiceClass} == dict(
        scheduler_pb2.ServiceClass.items()
    )


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


async def test_models_beyond_a_number_share_their_series(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names cost nothing: a tenant may publish, call and delete a tiny model all day."""
    monkeypatch.setattr("torchrelay.gateway.inference.model_labels.MAX_MODELS", 1)
    reader = InMemoryMetricReader()
    rig = await make_rig(meter=MeterProvider(metric_readers=[reader]).get_meter("test"))
    for model in ("echo", "plain", "long", "echo"):
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4}
        assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    await eventually(lambda: not rig.ports.reserved)
    points = collected(reader)
    for name in ("torchrelay_gateway_requests", "torchrelay_gateway_billed_dollars"):
        assert {(point.attributes or {})["model"] for point in points[name]} == {MODEL, "other"}
    labels = {(point.attributes or {})["gen_ai.request.model"] for point in points["gen_ai.server.request.duration"]}
    assert labels == {MODEL, "other"}


async def test_tokens_in_vain_are_counted_by_cause(make_rig: MakeRig) -> None:
    """An attempt whose worker dies is computed again; an answer whose client leaves reaches nobody, or in part."""
    reader = InMemoryMetricReader()
    rig = await make_rig(meter=MeterProvider(metric_readers=[reader]).get_meter("test"))
    first, second = rig.workers
    body = {"model": "echo", "prompt": [5, 6, 7], "max_tokens": 25}

    async def paused_after(worker: EchoWorker, num_tokens: int) -> asyncio.Task[httpx.Response]:
        worker.pause_at = num_tokens
        asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=body))
        await eventually(lambda: rig.num_accepted() == [num_tokens])
        return asking

    def wasted() -> dict[str, int]:
        points = collected(reader).get("torchrelay_gateway_wasted_tokens", [])
        return {(point.attributes or {})["cause"]: point.value for point in points}

    asking = await paused_after(first, 10)
    await first.kill()
    assert (await asking).status_code == 200 and wasted() == {"lost": 3 + 10}
    asking = await paused_after(second, 6)
    asking.cancel()
    await eventually(lambda: wasted() == {"lost": 3 + 10, "cancelled": 3 + 6})
    second.resume()
    second.pause_at = 4
    async with rig.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = (line async for line in response.aiter_lines() if line)
        for _ in range(4):
            await anext(lines)
    await eventually(lambda: not rig.ports.reserved)
    assert wasted() == {"lost": 3 + 10, "cancelled": 3 + 6}, "what the client read was of use"
