"""A prompt that a loading worker has begun continues at another worker, with the same tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
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
from tests.unit.engine.harness import Model, group_of, half_loaded, outputs, prompt_of, run
from tests.unit.param_store.running_store import CLUSTER_KEY, OFFICE, peer, running_store
from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest, Unavailable
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import prefill_pb2, types_pb2
from torchrelay.engine.execution import resident_model
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.export import PrefillExport
from torchrelay.engine.kv.prefill_import import PrefillImport
from torchrelay.engine.kv.prefill_layout import context_digests
from torchrelay.prefill import prompt_moves
from torchrelay.prefill import role as prefill_role
from torchrelay.prefill.prompt_moves import PromptReceiver, RecalledPrompts
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
        instance = self.loading.prefill.worker.engine.relay_instance
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

    async def move(self, request: Request, *, is_recalled: bool = True, **changes: Any) -> Request:
        """Recalls the attempt and sends the next one to the whole worker, with ``changes`` of its source's ticket."""
        if is_recalled:
            await request.recall()
        moved = Request(pb.AttemptStart(), self.whole.streams)
        moved.start.CopyFrom(request.start)
        moved.start.key.attempt += 1
        start = self.whole.for_prefill(moved)
        start.prompt_source.key.CopyFrom(request.start.key)
        start.prompt_source.worker.CopyFrom(worker_ref(self.loading.prefill))
        fields = {
            "buffer_id": f"{request.start.key.request_id}/1/prompt",
            "holder_id": self.loading.prefill.worker.settings.worker_id,
            "receiver_id": self.whole.prefill.worker.settings.worker_id,
            "expires_unix_ms": int(time.time() * 1000) + 60_000,
        }
        start.prompt_source.ticket.CopyFrom(OFFICE.issue(**{**fields, **changes}))
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


@pytest.mark.parametrize("apart", [False, True])
async def test_export_with_a_ticket_does_not_wait_for_the_recall(
    tmp_path: Path, model: Model, nats_url: str, apart: bool
) -> None:
    async with running_pair(tmp_path, model, nats_url, apart) as pair:
        request = pair.loading.request(PROMPT)
        await pair.begun(request, 2)
        moved = await pair.move(request, is_recalled=False)
        await moved.finished()
        await request.recall()
        assert moved.tokens() == model.expected(PROMPT) and len(import_details(moved)) == 1
        assert request.tokens() == []
        pair.pack.let_all()
        await pair.loading.prefill.until_ready()
        await pair.assert_idle()


@pytest.mark.parametrize(
    "changes",
    [{"buffer_id": "other/1/prompt"}, {"receiver_id": "other"}, {"holder_id": "other"}, {"expires_unix_ms": 1}],
)
async def test_prompt_is_exported_only_with_its_ticket(
    tmp_path: Path, model: Model, nats_url: str, changes: dict[str, Any]
) -> None:
    """The source computes on, and the whole worker computes the prompt from its beginning."""
    async with running_pair(tmp_path, model, nats_url, apart=False) as pair:
        request = pair.loading.request(PROMPT)
        await pair.begun(request, 2)
        moved = await pair.move(request, is_recalled=False, **changes)
        await moved.finished()
        assert moved.tokens() == model.expected(PROMPT) and import_details(moved) == []
        pair.pack.let_all()
        await request.finished()
        assert request.tokens() == model.expected(PROMPT)
        await pair.assert_idle()


async def test_decode_worker_that_hears_of_the_recall_first_does_not_end_the_prompt(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_role, "RECALL_DELAY_S", HANG_S)
    async with running_pair(tmp_path, model, nats_url, apart=True) as pair:
        decode, may_go_on = pair.loading.decode.worker, threading.Event()
        decode.engine.post(lambda: may_go_on.wait(HANG_S))
        request = pair.loading.request(PROMPT)
        [decode_role] = [role for role in decode.roles if role.number == DECODE]
        begun, ended = noted_reservations(decode_role)
        await pair.begun(request, 2)
        await eventually(lambda: bool(begun), "the offer at the decode worker")
        prefill_stream, decode_stream = request.streams
        await decode_stream.recall(request.start.key)
        await eventually(lambda: not decode_role.attempts, "the end at the decode worker")
        assert not ended
        may_go_on.set()
        await eventually(lambda: bool(ended), "the refusal of the KV")
        await prefill_stream.recall(request.start.key)
        moved = await pair.move(request, is_recalled=False)
        await moved.finished()
        assert moved.tokens() == model.expected(PROMPT) and len(import_details(moved)) == 1
        assert request.outputs() == []
        pair.pack.let_all()
        await pair.loading.prefill.until_ready()
        await pair.assert_idle()


def noted_reservations(decode_role: Any) -> tuple[list[object], list[object]]:
    """Grow with each reservation of pages for KV that begins, and that ends."""
    begun: list[object] = []
    ended: list[object] = []
    reserve = decode_role._reserve_pages

    async def noted(attempt: Any, offer: Any) -> Any:
        begun.append(offer)
        try:
            return await reserve(attempt, offer)
        finally:
            ended.append(offer)

    decode_role._reserve_pages = noted
    return begun, ended


async def test_import_waits_for_pages_while_its_source_computes_on(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_moves, "_KEPT_S", HANG_S)
    async with running_pair(tmp_path, model, nats_url, apart=False) as pair:
        request = pair.loading.request(PROMPT)
        await pair.begun(request, 1)
        whole = pair.whole.prefill.worker
        instance = whole.engine.relay_instance
        assert instance is not None
        allocator = instance._tables.allocator
        taken = await whole.engine.call(lambda: allocator.take(allocator.num_free))
        moved = await pair.move(request)
        await eventually(lambda: len(instance.groups()) == 1, "the prompt at the whole worker")
        pair.let_layers(2)
        await eventually(lambda: pair.boundaries == [2])
        await whole.engine.call(lambda: allocator.release(taken))
        await moved.finished()
        assert moved.tokens() == model.expected(PROMPT)
        [detail] = import_details(moved)
        assert detail.startswith("2 layers")
        pair.pack.let_all()
        await pair.loading.prefill.until_ready()
        await pair.assert_idle()


@pytest.mark.parametrize("apart", [False, True])
async def test_prompt_moves_in_pieces_between_steps(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(prompt_moves, "_MESSAGE_BYTES", 100)
    read_piece, is_kept = prompt_moves._read_piece, []
    async with running_pair(tmp_path, model, nats_url, apart) as pair:
        request = pair.loading.request(PROMPT)
        [prefill] = [role for role in pair.loading.prefill.worker.roles if role.number == PREFILL]

        def read(exported: PrefillExport, piece: range) -> bytes:
            is_kept.append(prefill.keeps_prompt(exported.spec.group_id))  # else a late recall would end it
            return read_piece(exported, piece)

        monkeypatch.setattr(prompt_moves, "_read_piece", read)
        await pair.begun(request, 2)
        moved = await pair.move(request)
        await moved.finished()
        assert moved.tokens() == model.expected(PROMPT) and len(import_details(moved)) == 1
        assert len(is_kept) > 3 and all(is_kept)
        pair.pack.let_all()
        await pair.loading.prefill.until_ready()
        await pair.assert_idle()


async def test_import_that_waits_for_pages_ends_with_its_attempt(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_moves, "_KEPT_S", HANG_S)
    async with running_pair(tmp_path, model, nats_url, apart=True) as pair:
        request = pair.loading.request(PROMPT)
        await pair.begun(request, 1)
        whole = pair.whole.prefill.worker
        instance = whole.engine.relay_instance
        assert instance is not None
        allocator = instance._tables.allocator
        taken = await whole.engine.call(lambda: allocator.take(allocator.num_free))
        moved = await pair.move(request)
        await eventually(lambda: len(instance.groups()) == 1, "the prompt at the whole worker")
        await moved.cancel()
        await eventually(lambda: not instance.groups(), "the end of the prompt")
        assert pair.boundaries == [1], "the source was not asked for it"
        await whole.engine.call(lambda: allocator.release(taken))
        pair.pack.let_all()
        await pair.loading.prefill.until_ready()
        await pair.assert_idle()


@pytest.mark.parametrize("broken", ["write", "receive", "start_over"])
async def test_broken_import_ends_no_other_prompt(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """What cannot be imported is computed from its beginning; what cannot be computed fails alone."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PrefillImport, "write" if broken == "start_over" else broken, fail)
    if broken == "start_over":
        monkeypatch.setattr(PrefillImport, "start_over", fail)
    async with running_pair(tmp_path, model, nats_url, apart=False) as pair:
        other = await pair.whole.send(pair.whole.request(prompt_of(33), max_tokens=150))
        await eventually(lambda: len(other.tokens()) > 1)
        request = pair.loading.request(PROMPT)
        await pair.begun(request, 2)
        moved = await pair.move(request)
        await moved.finished()
        await other.finished()
        assert len(other.tokens()) == 150
        if broken == "start_over":
            assert moved.error().code == pb.RunError.CODE_INTERNAL
            await moved.cancel()
        else:
            assert moved.tokens() == model.expected(PROMPT)
        assert import_details(moved) == []
        pair.pack.let_all()
        await pair.loading.prefill.until_ready()
        await pair.assert_idle()


PACK_ID = "pack-1"
DIGESTS = context_digests(group_of(PROMPT))


def exported_prompt(**changes: Any) -> prefill_pb2.ExportPart:
    fields: dict[str, Any] = {"boundary": 1, "block_tokens": 16, "pack_id": PACK_ID, "context_digests": DIGESTS}
    return prefill_pb2.ExportPart(prompt=prefill_pb2.ExportedPrompt(**{**fields, **changes}))


class InlineEngine:
    """Runs commands at once."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance

    def require_relay_instance(self) -> Any:
        return self.instance

    def call(self, command: Callable[[], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(command())
        except Exception as error:
            future.set_exception(error)
        return future

    call_between_layers = call


async def receiver_of(model: Model) -> tuple[PromptReceiver, InlineEngine]:
    engine = InlineEngine(model.instance())
    receiver = PromptReceiver(engine, group_of(PROMPT), PACK_ID, None)  # type: ignore[arg-type]
    await receiver.reserve()
    return receiver, engine


async def stream_of(parts: Sequence[prefill_pb2.ExportPart]) -> AsyncIterator[prefill_pb2.ExportPart]:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "must begin with its prompt"),
        ([prefill_pb2.ExportPart(data=b"x")], "must begin with its prompt"),
        ([exported_prompt(block_tokens=0)], "must name its block_tokens"),
        ([exported_prompt(boundary=9)], "layer boundary 9"),
        ([exported_prompt(pack_id="pack-2")], "of other tokens, or of another pack"),
        ([exported_prompt(context_digests=context_digests(group_of(PROMPT[::-1])))], "of other tokens"),
        ([exported_prompt(context_digests=[])], "of other tokens"),
        ([exported_prompt(), prefill_pb2.ExportPart(data=b"x")], "ends before chunk"),
        ([exported_prompt(), prefill_pb2.ExportPart(data=bytes(1 << 20))], "does not end after"),
    ],
)
async def test_malformed_export_is_computed_from_its_beginning(
    model: Model, parts: Sequence[prefill_pb2.ExportPart], why: str
) -> None:
    receiver, engine = await receiver_of(model)
    with pytest.raises((DataCorrupted, InvalidRequest), match=why):
        await receiver.receive(stream_of(parts))
    await receiver.start_over()
    assert outputs(run(engine.instance))["r/0", 0] == model.expected(PROMPT)


async def test_import_does_nothing_once_its_instance_is_gone(model: Model) -> None:
    receiver, engine = await receiver_of(model)
    engine.instance = object()
    with pytest.raises(Conflict, match="was unloaded"):
        await receiver.receive(stream_of([exported_prompt()]))
    with pytest.raises(Conflict, match="was unloaded"):
        await receiver.start_over()


def kept_prompt(model: Model) -> tuple[Instance, RecalledPrompts]:
    instance = half_loaded(model, 2)
    recalled = RecalledPrompts(SimpleNamespace(engine=InlineEngine(instance), cancel=instance.cancel))
    instance.prefill(group_of(PROMPT))
    run(instance)
    recalled.keep("r/0")
    return instance, recalled


async def test_export_ends_with_its_instance(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may be another model's by then."""
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    instance, recalled = kept_prompt(model)
    parts = recalled.export("r/0", PACK_ID)
    assert (await anext(parts)).prompt.boundary == 2 and (await anext(parts)).data
    recalled._worker.engine.instance = half_loaded(model, 2)
    with pytest.raises(Conflict, match="was unloaded"):
        await anext(parts)
    assert "r/0" not in recalled and instance.groups() == ()


async def test_export_is_given_up_when_the_importer_hangs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, recalled = kept_prompt(model)
    parts = recalled.export("r/0", PACK_ID)
    monkeypatch.setattr(prompt_moves, "_KEPT_S", 0.05)
    assert (await anext(parts)).prompt.boundary == 2
    with pytest.raises(Conflict, match="nothing is kept"):
        await anext(recalled.export("r/0", PACK_ID))
    assert "r/0" in recalled
    await eventually(lambda: not instance.groups(), "the end of the prompt")
    with pytest.raises(Conflict, match="has ended"):
        await anext(parts)


async def test_export_goes_on_as_long_as_the_importer_takes_messages(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    _, recalled = kept_prompt(model)
    ends_s = []
    async for _ in recalled.export("r/0", PACK_ID):
        ends_s.append(recalled._timers["r/0"].when())
    assert len(ends_s) > 3 and all(earlier < later for earlier, later in pairwise(ends_s))


async def test_silent_export_is_computed_from_its_beginning(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_moves, "_MESSAGE_S", 0.05)
    receiver, engine = await receiver_of(model)
    is_closed = asyncio.Event()

    async def silent() -> AsyncIterator[prefill_pb2.ExportPart]:
        yield exported_prompt()
        try:
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    with pytest.raises(Unavailable, match="was silent"):
        await receiver.receive(silent())
    assert is_closed.is_set()
    await receiver.start_over()
    assert outputs(run(engine.instance))["r/0", 0] == model.expected(PROMPT)


async def test_importer_holds_at_most_two_pieces(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no more messages while the engine has not copied the piece before the last."""
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    receiver, engine = await receiver_of(model)
    layout = engine.instance._prefill_layout(group_of(PROMPT), 1, 16)
    queued: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
    run_at_once = engine.call

    def call(command: Callable[[], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        queued.append((command, future))
        return future

    num_taken = 0

    async def parts() -> AsyncIterator[prefill_pb2.ExportPart]:
        nonlocal num_taken
        engine.call_between_layers = call  # type: ignore[method-assign]
        yield exported_prompt()
        for piece in layout.pieces(1 << 10):
            num_taken += 1
            yield prefill_pb2.ExportPart(data=bytes(sum(map(layout.chunk_bytes, piece))))

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    receiving = asyncio.ensure_future(receiver.receive(parts()))
    await settle()
    command, future = queued.pop()  # the preparation for the chunks
    future.set_result(await run_at_once(command))
    num_pieces = len(list(layout.pieces(1 << 10)))
    for number in range(num_pieces):
        await settle()
        assert len(queued) == 1 and num_taken <= number + 2
        command, future = queued.pop()
        future.set_result(await run_at_once(command))
    assert num_pieces > 2 and await receiving == 1
