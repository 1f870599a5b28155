"""A prompt that a loading worker has begun continues at another worker, with the same tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.roles_testbed import (
    DECODE,
    PREFILL,
    Request,
    RolesTestbed,
    RunningWorker,
    running_test_worker,
)
from tests.integration.test_loading import GatedPack
from tests.support.callers import every_token
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model, group_of, prompt_of
from tests.unit.param_store.running_store import CLUSTER_KEY, peer, running_store
from torchrelay.common.errors import DataCorrupted
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import prefill_pb2, types_pb2
from torchrelay.engine.execution import resident_model
from torchrelay.prefill import prompt_moves
from torchrelay.prefill.prompt_moves import PromptReceiver
from torchrelay.transfer.protocol.tickets import derive_node_key
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.tcp import TcpTransport

PROMPT = prompt_of(70)


@dataclass
class Pair:
    """A loading worker, and a whole worker that continues its prompts. Each decodes itself, or a third worker does."""

    loading: RolesTestbed
    whole: RolesTestbed
    pack: GatedPack

    @property
    def boundaries(self) -> list[int]:
        instance = self.loading.prefill.worker.engine.instance
        return [] if instance is None else [group.layer for group in instance.groups()]

    def let_layers(self, num_layers: int) -> None:
        """Delivers the embeddings and the first layers."""
        manifest = self.pack.manifest
        end = -(-manifest.segments[num_layers].end // manifest.chunk_bytes)
        self.pack.let(*(index for index in range(end) if not self.pack.ready_flags()[index]))

    async def begun(self, request: Request, boundary: int) -> None:
        """Sends a request to the loading worker, which computes it up to a boundary."""
        self.let_layers(boundary)
        await self.loading.send(request)
        await eventually(lambda: self.boundaries == [boundary])

    async def move(self, request: Request) -> Request:
        """Recalls the attempt and sends the next attempt to the whole worker."""
        await request.recall()
        moved = Request(pb.AttemptStart(), self.whole.streams)
        moved.start.CopyFrom(request.start)
        moved.start.key.attempt += 1
        start = self.whole.for_prefill(moved)
        start.prompt_source.key.CopyFrom(request.start.key)
        start.prompt_source.worker.CopyFrom(worker_ref(self.loading.prefill))
        prefill, decode = moved.streams
        await decode.send(self.whole.for_decode(moved))
        await prefill.send(start)
        return moved

    async def assert_idle(self) -> None:
        await self.loading.assert_idle()
        await self.whole.assert_idle()


def worker_ref(worker: RunningWorker) -> types_pb2.WorkerRef:
    worker_id = worker.worker.settings.worker_id
    token = every_token(CLUSTER_KEY, worker_id)
    return types_pb2.WorkerRef(worker_id=worker_id, grpc_address=worker.address, worker_token=token)


@asynccontextmanager
async def running_pair(folder: Path, model: Model, nats_url: str, apart: bool) -> AsyncIterator[Pair]:
    gated, full = GatedPack(model), GatedPack(model)
    full.let_all()
    async with AsyncExitStack() as stack:
        workers = []
        for name, pack in (("loading", gated), ("whole", full)):
            listener = TcpTransport().listen("127.0.0.1", 0)
            holder = HolderServer(name, derive_node_key(CLUSTER_KEY, name), {pack.buffer_id: pack}.get, listener)
            holder.start()
            stack.push_async_callback(asyncio.to_thread, holder.close)
            store = await stack.enter_async_context(running_store(folder / name))
            await store.relay(pack.buffer_id, peer(name, holder.address, pack.buffer_id, store))
            workers.append(await stack.enter_async_context(running_test_worker(nats_url, store)))
        whole = workers[1]
        version = types_pb2.ModelVersion(model="acme/gated", pack_id=gated.buffer_id)
        if apart:
            decode = await stack.enter_async_context(running_test_worker(nats_url, store))
            await decode.load(version, [DECODE])
            await decode.until_ready()
        for worker in workers:
            await worker.load(version, [PREFILL, DECODE])
        await whole.until_ready()
        loading_scene, whole_scene = (RolesTestbed(each, decode if apart else each, version) for each in workers)
        for scene in (loading_scene, whole_scene):
            scene.streams = await scene.connect()
        yield Pair(loading_scene, whole_scene, gated)
        gated.let_all()


def import_details(request: Request) -> Sequence[str]:
    phases = [phase for output in request.outputs() for phase in output.phases]
    return [phase.detail for phase in phases if phase.name == "import"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("boundary", [1, 2])
async def test_begun_prompt_continues_elsewhere(
    tmp_path: Path, model: Model, nats_url: str, boundary: int, apart: bool
) -> None:
    async with running_pair(tmp_path, model, nats_url, apart) as pair:
        request = pair.loading.request(PROMPT, num_choices=2)
        await pair.begun(request, boundary)
        moved = await pair.move(request)
        await moved.finished()
        assert moved.tokens(0) == moved.tokens(1) == model.expected(PROMPT)
        assert {output.key.attempt for output in moved.outputs()} == {2}  # the first attempt has ended in silence
        [detail] = import_details(moved)
        assert detail.startswith(f"{boundary} layer")
        pair.pack.let_all()
        await pair.loading.prefill.until_ready()
        await pair.assert_idle()


async def test_prompt_without_a_layer_is_computed_from_its_beginning(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_model, "_HIDDEN_STATES_SHARE", 0.0)  # so that no prompt begins during a load
    async with running_pair(tmp_path, model, nats_url, apart=False) as pair:
        request = pair.loading.request(PROMPT)
        pair.let_layers(2)
        await pair.loading.send(request)
        await eventually(lambda: pair.boundaries == [0])
        moved = await pair.move(request)
        await moved.finished()
        assert moved.tokens() == model.expected(PROMPT)
        assert import_details(moved) == []
        pair.pack.let_all()
        await pair.loading.prefill.until_ready()
        await pair.assert_idle()


async def test_prompt_of_a_lost_worker_is_computed_from_its_beginning(
    tmp_path: Path, model: Model, nats_url: str
) -> None:
    async with running_pair(tmp_path, model, nats_url, apart=True) as pair:
        request = pair.loading.request(PROMPT)
        await pair.begun(request, 2)
        await pair.loading.prefill.unload()
        moved = await pair.move(request)
        await moved.finished()
        assert moved.tokens() == model.expected(PROMPT) and import_details(moved) == []
        await pair.whole.assert_idle()


async def test_recalled_prompt_that_nobody_exports_is_dropped(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_moves, "_KEPT_S", 0.05)
    async with running_pair(tmp_path, model, nats_url, apart=False) as pair:
        request = pair.loading.request(PROMPT)
        await pair.begun(request, 2)
        await request.recall()
        await eventually(lambda: pair.boundaries == [])
        await pair.assert_idle()


@pytest.mark.parametrize("apart", [False, True])
async def test_recall_that_crosses_the_first_token_ends_the_answer(
    tmp_path: Path, model: Model, nats_url: str, apart: bool
) -> None:
    async with running_pair(tmp_path, model, nats_url, apart) as pair:
        request = await pair.whole.send(pair.whole.request(PROMPT, max_tokens=150))
        await eventually(lambda: len(request.tokens()) > 2, "tokens of the decode role")
        decode, may_go_on = pair.whole.decode.worker, threading.Event()
        decode.engine.post(lambda: may_go_on.wait(HANG_S))
        await request.recall()
        await eventually(lambda: not any(role.attempts for role in decode.roles), "the end of the attempt")
        may_go_on.set()
        await pair.whole.assert_idle()
        assert decode.step_metrics.num_positions_decoded < 149


async def test_kept_prompt_that_is_computed_to_its_end_is_dropped(tmp_path: Path, model: Model, nats_url: str) -> None:
    async with running_pair(tmp_path, model, nats_url, apart=False) as pair:
        request = pair.loading.request(PROMPT, max_tokens=150)
        await pair.begun(request, 2)
        await request.recall()
        await eventually(lambda: not any(role.attempts for role in pair.loading.prefill.worker.roles))
        pair.pack.let_all()
        await eventually(lambda: pair.boundaries == [])
        assert pair.loading.prefill.worker.step_metrics.num_positions_decoded < 149


async def test_import_writes_nothing_once_its_instance_is_gone() -> None:
    engine = SimpleNamespace(instance=object(), post=lambda command: command())
    receiver = PromptReceiver(engine, group_of(PROMPT), None)  # type: ignore[arg-type]
    receiver._instance = engine.instance
    written: list[int] = []
    prompt_import: Any = SimpleNamespace(write=lambda index, data: written.append(index))
    receiver._write_chunk(prompt_import, 0, b"")
    engine.instance = object()
    receiver._write_chunk(prompt_import, 1, b"")
    assert written == [0]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "must begin with its prompt"),
        ([prefill_pb2.ExportPart(data=b"x")], "must begin with its prompt"),
        ([prefill_pb2.ExportPart(prompt=prefill_pb2.ExportedPrompt(boundary=1))], "must name its block_tokens"),
    ],
)
async def test_malformed_export_is_refused(parts: Sequence[prefill_pb2.ExportPart], why: str) -> None:
    async def stream() -> AsyncIterator[prefill_pb2.ExportPart]:
        for part in parts:
            yield part

    receiver = PromptReceiver(SimpleNamespace(), group_of(PROMPT), None)  # type: ignore[arg-type]
    with pytest.raises(DataCorrupted, match=why):
        await receiver.receive(stream())
