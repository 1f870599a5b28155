"""A load that is interrupted: whatever ends it, the slot becomes free and reports why."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.integration.roles_testbed import DECODE, PREFILL, RolesTestbed, RunningWorker, running_test_worker
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model, prompt_of
from tests.unit.param_store.running_store import CLUSTER_KEY, RunningStore, peer, running_store
from torchrelay.common.errors import NotFound
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import param_store_pb2, types_pb2
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreServicer, add_ParamStoreServicer_to_server
from torchrelay.engine.instance import Instance
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.protocol.tickets import derive_node_key
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.tcp import TcpTransport
from torchrelay.worker import worker as worker_module
from torchrelay.worker.slot.slot import DRAINING, FREE, LOADING
from torchrelay.worker.worker import Worker

PROMPT = prompt_of(70)


class GatedPack(MemoryBuffer):
    """A pack whose holder serves only the released chunks."""

    def __init__(self, model: Model) -> None:
        self.manifest = manifest = model.pack.manifest
        self._data = model.pack.data
        encoded = manifest.encode()
        self._step = manifest.chunk_bytes
        sizes = [len(self._data[i : i + self._step]) for i in range(0, len(self._data), self._step)]
        super().__init__(pack_id_of(encoded), sizes)
        self.head = encoded

    def let(self, *chunks: int) -> None:
        for index in chunks:
            self.publish(index, self._data[index * self._step : (index + 1) * self._step])

    def let_all(self) -> None:
        self.let(*(index for index in range(self.num_chunks) if not self.ready_flags()[index]))


@asynccontextmanager
async def loading(folder: Path, model: Model, nats_url: str) -> AsyncIterator[tuple[RolesTestbed, GatedPack]]:
    """A worker of both roles in the middle of a load, with a request waiting inside the engine for a layer."""
    pack = GatedPack(model)
    pack.let(0)
    listener = TcpTransport().listen("127.0.0.1", 0)
    holder = HolderServer("peer", derive_node_key(CLUSTER_KEY, "peer"), {pack.buffer_id: pack}.get, listener)
    holder.start()
    try:
        async with running_store(folder) as store, running_test_worker(nats_url, store) as worker:
            await store.relay(pack.buffer_id, peer("peer", holder.address, pack.buffer_id, store))
            version = types_pb2.ModelVersion(model="acme/gated", pack_id=pack.buffer_id)
            await worker.load(version, [PREFILL, DECODE])
            scene = RolesTestbed(worker, worker, version)
            scene.streams = await scene.connect()
            yield scene, pack
    finally:
        await asyncio.to_thread(holder.close)


async def started(scene: RolesTestbed, worker: RunningWorker) -> bool:
    hosted = worker.worker.slot.hosted
    assert hosted is not None
    await hosted.settled.wait()
    await eventually(lambda: bool(worker.worker.engine.relay_instance and worker.worker.engine.relay_instance.groups()))
    return worker.worker.slot.state == LOADING


async def test_slot_reports_each_layer_that_arrives(tmp_path: Path, model: Model, nats_url: str) -> None:
    """The scheduler predicts by them what is left of a load; it reported of none before the last."""
    async with loading(tmp_path, model, nats_url) as (scene, pack):
        slot, manifest = scene.prefill.worker.slot, model.pack.manifest
        request = await scene.send(scene.request(PROMPT))
        assert await started(scene, scene.prefill) and not request.outputs()
        reported: list[int] = []
        shares: list[float] = []

        async def watch() -> None:
            async for _ in slot.changes():
                reported.append(slot.report().num_layers_ready)
                shares.append(slot.report().loaded_share)

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            for number, segment in enumerate(manifest.segments[1:-1], 1):
                missing = range(-(-segment.end // manifest.chunk_bytes))
                pack.let(*(index for index in missing if not pack.ready_flags()[index]))
                await eventually(lambda number=number: bool(reported) and reported[-1] >= number)  # type: ignore[misc]
                loaded = manifest.segments[reported[-1] :]  # the last layer may have come with the head
                ends = [segment.end for segment in (loaded if len(loaded) == 2 else loaded[:1])]
                assert any(shares[-1] == pytest.approx(end / manifest.segments[-1].end) for end in ends)
            watching.cancel()
        assert len(set(reported)) > 1
        pack.let_all()
        await request.finished()
        assert request.tokens() == model.expected(PROMPT)
        await scene.prefill.until_ready()
        await scene.assert_idle()


async def test_slot_is_ready_once_its_engine_has_started(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vLLM, which compiles kernels for a minute after the last bytes."""
    has_started = threading.Event()
    monkeypatch.setattr(Instance, "is_ready", property(lambda _: has_started.is_set()))
    async with loading(tmp_path, model, nats_url) as (scene, pack):
        worker = scene.prefill.worker
        pack.let_all()
        await eventually(lambda: "last_layer" in phases_of(worker))
        assert (worker.slot.state, worker.slot.report().loaded_share) == (LOADING, 1.0)
        has_started.set()
        worker.engine.require_relay_instance().model.weights.gate.on_change()
        await scene.prefill.until_ready()
        assert phases_of(worker) == ["hold", "map", "first_layer", "last_layer", "engine"]


def phases_of(worker: Worker) -> list[str]:
    return [phase.name for phase in worker.slot.report().load_phases]


async def test_unload_during_a_load_drains_without_becoming_ready(tmp_path: Path, model: Model, nats_url: str) -> None:
    async with loading(tmp_path, model, nats_url) as (scene, pack):
        worker = scene.prefill.worker
        request = await scene.send(scene.request(PROMPT, max_tokens=200))
        assert await started(scene, scene.prefill)
        await scene.prefill.unload(drain_s=20)
        assert worker.slot.state == DRAINING
        pack.let_all()
        await eventually(lambda: len(request.tokens()) > 3)
        assert worker.slot.state == DRAINING
        await request.finished()
        assert request.tokens()[:24] == model.expected(PROMPT)
        await scene.prefill.until_free()


async def test_second_unload_shortens_the_drain(tmp_path: Path, model: Model, nats_url: str) -> None:
    async with loading(tmp_path, model, nats_url) as (scene, _):
        request = await scene.send(scene.request(PROMPT, max_tokens=200))
        assert await started(scene, scene.prefill)
        await scene.prefill.unload(drain_s=600)
        await scene.prefill.unload(drain_s=700)
        assert scene.prefill.worker.slot.state == DRAINING, "a drain never becomes longer, nor ends at once"
        await scene.prefill.unload()
        await scene.prefill.until_free()
        await request.finished()


def is_of_an_arena(address: int) -> bool:
    """Whether an arena is mapped at this address of the process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.partition(" ")[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return "/dev/shm/torchrelay" in line
    return False


@pytest.mark.parametrize("cut", ["unload", "holder dies"])
async def test_failed_load_fails_its_requests_and_frees_the_slot(
    tmp_path: Path, model: Model, nats_url: str, cut: str
) -> None:
    async with loading(tmp_path, model, nats_url) as (scene, pack):
        worker = scene.prefill.worker
        request = await scene.send(scene.request(PROMPT))
        assert await started(scene, scene.prefill)
        assert worker.loader is not None
        slab = worker.loader.slab
        assert slab is not None
        address = int(np.frombuffer(slab.data, np.uint8).ctypes.data)
        assert is_of_an_arena(address)
        if cut == "unload":
            await scene.prefill.unload()
        else:
            pack.fail("the host burnt down")
        await scene.prefill.until_free()
        await request.finished()
        assert not is_of_an_arena(address)
        report = worker.slot.report()
        if cut == "unload":
            assert (report.error, request.error().code) == ("", pb.RunError.CODE_WRONG_INSTANCE)
        else:
            assert (
                report.error
                and not report.store_was_lost
                and worker.slot.failed_instance_id == scene.prefill.instance_id
            )
            assert request.error().code == pb.RunError.CODE_LOAD_FAILED
            late = await scene.send(scene.request(PROMPT))
            await late.finished()
            assert late.error().code == pb.RunError.CODE_LOAD_FAILED
        assert worker.engine.relay_instance is None


async def test_load_without_its_store_reports_the_store_as_lost(tmp_path: Path, model: Model, nats_url: str) -> None:
    async with AsyncExitStack() as stack:
        async with running_store(tmp_path) as store:
            worker = await stack.enter_async_context(running_test_worker(nats_url, store))
        await worker.load(
            types_pb2.ModelVersion(model="acme/lost", pack_id=GatedPack(model).buffer_id), [PREFILL, DECODE]
        )
        await worker.until_free()
        report = worker.worker.slot.report()
        assert report.store_was_lost and "the store did not deliver the pack" in report.error


async def test_failed_relay_of_a_live_store_is_no_loss_of_the_store(
    tmp_path: Path, model: Model, nats_url: str
) -> None:
    pack_id = GatedPack(model).buffer_id
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    async with running_store(tmp_path) as store, running_test_worker(nats_url, store) as worker:
        await worker.load(types_pb2.ModelVersion(model="acme/gone", pack_id=pack_id), [PREFILL, DECODE])
        with pytest.raises(grpc.aio.AioRpcError):
            await store.relay(pack_id, peer("peer", address, pack_id, store))
        await worker.until_free()
        report = worker.worker.slot.report()
        assert report.error and not report.store_was_lost


async def test_broken_kernel_frees_the_slot_with_the_reason(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(tmp_path, model, nats_url) as (scene, pack):
        pack.let_all()
        await scene.prefill.until_ready()
        instance = scene.prefill.worker.engine.relay_instance

        def broken() -> None:
            raise RuntimeError("a kernel broke")

        monkeypatch.setattr(instance, "step", broken)
        request = await scene.send(scene.request(PROMPT))
        await request.finished()
        assert request.error().code == pb.RunError.CODE_LOAD_FAILED
        await scene.prefill.until_free()
        assert "a kernel broke" in scene.prefill.worker.slot.report().error


async def test_worker_ends_when_its_gpu_computes_nothing_any_more(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a new process can compute on it. The worker failed every later load."""
    ends: list[str] = []

    async def fault(device: str, num_devices: int) -> str:
        return f"{device} fell off the bus"

    async with loading(tmp_path, model, nats_url) as (scene, pack):
        pack.let_all()
        await scene.prefill.until_ready()
        monkeypatch.setattr(worker_module, "device_fault", fault)
        monkeypatch.setattr(worker_module, "end_process", lambda: ends.append("ended"))
        await scene.prefill.unload(drain_s=0)
        await scene.prefill.until_free()
        assert not ends, "nothing has failed"
        await scene.prefill.load(types_pb2.ModelVersion(model="acme/none", pack_id="none"), [PREFILL, DECODE])
        await eventually(lambda: bool(ends))


class LosableHold(ParamStoreServicer):
    """Stands before a store: ends the first hold when told to, and has lost the pack by the next."""

    def __init__(self, store: RunningStore) -> None:
        self._store = store
        self.lost = asyncio.Event()
        self.requests: list[param_store_pb2.HoldRequest] = []

    async def Hold(
        self, request: param_store_pb2.HoldRequest, context: Any
    ) -> AsyncIterator[param_store_pb2.HoldReply]:
        self.requests.append(request)
        if self.lost.is_set():
            raise NotFound("the range is another pack's")
        hold = self._store.stub.Hold(request)
        yield await anext(aiter(hold))
        await self.lost.wait()
        hold.cancel()


async def test_lost_hold_reports_a_missing_pack_without_a_relay(tmp_path: Path, model: Model, nats_url: str) -> None:
    """While it waited it would compute with the bytes of another pack."""
    pack = GatedPack(model)
    pack.let_all()
    listener = TcpTransport().listen("127.0.0.1", 0)
    holder = HolderServer("peer", derive_node_key(CLUSTER_KEY, "peer"), {pack.buffer_id: pack}.get, listener)
    holder.start()
    front = RpcServer("127.0.0.1")
    try:
        async with running_store(tmp_path) as store:
            servicer = LosableHold(store)  # type: ignore[abstract]
            add_ParamStoreServicer_to_server(servicer, front.server)
            await front.start()
            await store.relay(pack.buffer_id, peer("peer", holder.address, pack.buffer_id, store))
            await store.until_complete(pack.buffer_id)
            address = f"127.0.0.1:{front.port}"
            async with running_test_worker(nats_url, store, store_address=address) as worker:
                await worker.load(types_pb2.ModelVersion(model="acme/held", pack_id=pack.buffer_id), [PREFILL, DECODE])
                await worker.until_ready()
                servicer.lost.set()
                await worker.until_free()
                assert "no longer holds the pack" in worker.worker.slot.report().error
            assert [request.waits_for_relay for request in servicer.requests] == [True, False]
    finally:
        await front.stop(0)
        await asyncio.to_thread(holder.close)


async def test_shutdown_ends_a_load(tmp_path: Path, model: Model, nats_url: str) -> None:
    async with asyncio.timeout(HANG_S), loading(tmp_path, model, nats_url) as (scene, _):
        await scene.send(scene.request(PROMPT))
        assert await started(scene, scene.prefill)  # by itself the load would never end


@pytest.mark.parametrize("grace_s", [60.0, 0.0])
async def test_leaving_worker_empties_its_slot(tmp_path: Path, model: Model, nats_url: str, grace_s: float) -> None:
    """Its running answer ends within the grace, or is given back to the gateway; nothing new is taken."""
    async with loading(tmp_path, model, nats_url) as (scene, pack):
        worker = scene.prefill.worker
        request = await scene.send(scene.request(PROMPT, max_tokens=200))
        pack.let_all()
        await eventually(lambda: len(request.tokens()) > 3)
        assert await worker.health_fault() == ""
        leaving = asyncio.create_task(worker.leave(grace_s))
        await eventually(lambda: worker.slot.state in (DRAINING, FREE))
        assert await worker.health_fault() == "the worker leaves"
        await leaving
        assert worker.slot.state == FREE
        await request.finished()  # its last tokens may still be on their way
        if grace_s:
            assert len(request.tokens()) == 200 and request.tokens()[:24] == model.expected(PROMPT)
        else:
            assert request.outputs()[-1].error.code == pb.RunError.CODE_WRONG_INSTANCE
        with pytest.raises(grpc.aio.AioRpcError, match="this worker leaves"):
            await scene.prefill.load(scene.version, [PREFILL])
