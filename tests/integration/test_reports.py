"""Idle workers and stores report less often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.roles_testbed import running_test_worker
from tests.support.callers import every_token
from tests.unit.param_store.running_store import CLUSTER_KEY, running_store
from torchrelay.common.errors import StaleEpoch
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1.generation_pb2 import AttemptStart
from torchrelay.control.v1.param_store_pb2 import WatchCopiesRequest
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.control.v1.reports_pb2 import EngineProfile
from torchrelay.control.v1.types_pb2 import ROLE_PREFILL, AttemptKey, ModelVersion
from torchrelay.control.v1.worker_pb2 import WatchSlotRequest
from torchrelay.control.v1.worker_pb2_grpc import WorkerStub
from torchrelay.engine.core import StepProfile, StepResult
from torchrelay.worker.attempts.attempt import Attempt
from torchrelay.worker.attempts.outbox import Outbox
from torchrelay.worker.reporter import Reporter
from torchrelay.worker.slot.slot import HostedInstance


def attempt_of(request_id: str) -> Attempt:
    return Attempt(AttemptStart(key=AttemptKey(request_id=request_id, attempt=1), num_prompt_tokens=9), Outbox("g"), {})


async def test_worker_activity_follows_its_requests(tmp_path: Path, nats_url: str) -> None:
    async with running_store(tmp_path) as store, running_test_worker(nats_url, store) as worker:
        reporter = Reporter(worker.worker, "127.0.0.1:1")
        idle, first, second = reporter.activity(), reporter.report(), reporter.report()
        assert first.worker_id and first.SerializeToString() == second.SerializeToString()
        assert reporter.activity() == idle
        attempt = attempt_of("r")
        role = worker.worker.role(ROLE_PREFILL)
        assert role is not None
        role.attempts[attempt.group_id] = attempt
        began = reporter.activity()
        worker.worker.step_metrics.record_step(StepResult((), (), 0, 1, 0.01))
        assert reporter.activity() == began != idle
        assert reporter.report() != first
        worker.worker.step_metrics.record_step(StepResult((), (attempt.group_id,), 9, 0, 0.01))
        assert reporter.activity() != began, "a step of a prompt teaches the latency model"
        role.forget(attempt)


async def test_a_load_holds_its_slot_back_until_a_layer_has_arrived(tmp_path: Path, nats_url: str) -> None:
    async with running_store(tmp_path) as store, running_test_worker(nats_url, store) as worker:
        reporter, slot = Reporter(worker.worker, "127.0.0.1:1"), worker.worker.slot
        assert not reporter.report().HasField("profile")
        hosted = HostedInstance("i-1", ModelVersion(model="acme/tiny", pack_id="p"), [ROLE_PREFILL])
        await slot.begin_load(hosted)
        assert reporter.report().profile == EngineProfile(bottleneck="loading")
        waited = StepResult((), (), 0, 1, 0.01, profile=StepProfile(compute_s=0.4, io_wait_s=0.6))
        worker.worker.step_metrics.record_step(waited, slot.instance_labels)
        hosted.num_layers_ready = 1
        assert reporter.report().profile.bottleneck == "io_wait"
        await slot.release()
        assert not reporter.report().HasField("profile")


async def test_report_streams_carry_beats_on_demand(tmp_path: Path, nats_url: str) -> None:
    async with running_store(tmp_path) as store, running_test_worker(nats_url, store) as worker:
        address = (await store.report()).grpc_address
        store_token = every_token(CLUSTER_KEY, store.store_id)
        async with (
            open_channel(worker.address, token=worker.token) as worker_channel,
            open_channel(address, token=store_token) as store_channel,
        ):
            slot: Any = WorkerStub(worker_channel).WatchSlot(WatchSlotRequest(beat_every_s=0.1))
            copies: Any = ParamStoreStub(store_channel).WatchCopies(WatchCopiesRequest(beat_every_s=0.1))
            for stream in (slot, copies):
                async with asyncio.timeout(20):
                    report = await stream.read()
                    while not (beat := await stream.read()).is_beat:
                        report = beat
                assert not report.is_beat and report.grpc_address
                assert beat.incarnation == report.incarnation and not beat.grpc_address
                stream.cancel()
            assert report.store_id == beat.store_id


async def test_old_scheduler_loses_its_report_streams(tmp_path: Path, nats_url: str) -> None:
    """It sends no command, and needs no broker."""
    async with running_store(tmp_path) as store, running_test_worker(nats_url, store) as worker:
        address, store_token = (await store.report()).grpc_address, every_token(CLUSTER_KEY, store.store_id)
        async with (
            open_channel(worker.address, token=worker.token) as worker_channel,
            open_channel(address, token=store_token) as store_channel,
            asyncio.timeout(20),
        ):
            worker_stub, store_stub = WorkerStub(worker_channel), ParamStoreStub(store_channel)
            watches: list[Callable[[int], Any]] = [
                lambda epoch: worker_stub.WatchSlot(WatchSlotRequest(beat_every_s=0.1, epoch=epoch)),
                lambda epoch: store_stub.WatchCopies(WatchCopiesRequest(beat_every_s=0.1, epoch=epoch)),
            ]
            for watch in watches:
                older = aiter(watch(7))
                assert (await anext(older)).epoch == 7
                newer = watch(8)
                assert (await newer.read()).epoch == 8
                for fenced_out in (older, aiter(watch(7))):
                    last_epoch = 0
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        async for report in fenced_out:
                            last_epoch = report.epoch
                    assert isinstance(error_from_rpc(caught.value), StaleEpoch) and last_epoch == 8
                assert (await newer.read()).is_beat
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch(1 << 62).read()
                assert "ahead of this host's clock" in str(caught.value.details())
                newer.cancel()
