"""Prompts that are offered to another worker: what the source keeps and gives up, and what the receiver refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model, group_of, half_loaded, outputs, prompt_of, run
from tests.unit.transfer.loopback_holders import receiver as node
from tests.unit.transfer.loopback_holders import silent_listener, source_at
from torchrelay.common.errors import Conflict, DataCorrupted, InvalidRequest
from torchrelay.control.v1 import decode_pb2, types_pb2
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.layout import context_digests
from torchrelay.prefill import prompt_moves
from torchrelay.prefill.byte_budget import ByteBudget
from torchrelay.prefill.prompt_moves import PromptReceiver, RecalledPrompts
from torchrelay.transfer.errors import BufferLost, SourcesExhausted
from torchrelay.transfer.transport.tcp import TcpTransport
from torchrelay.worker.kv_receiver import KvReceiver

PROMPT = prompt_of(70)
PACK_ID = "pack-1"
DIGESTS = context_digests(group_of(PROMPT))
BUFFER_ID = "r/0/prompt"


def offer_of(address: str = "127.0.0.1:1", **changes: Any) -> decode_pb2.KvOffer:
    fields: dict[str, Any] = {"boundary": 1, "block_tokens": 16, "pack_id": PACK_ID, "context_digests": DIGESTS}
    ticket = source_at(address, BUFFER_ID).ticket
    source = types_pb2.Source(holder_id="host-h", data_address=address, ticket=ticket)
    return decode_pb2.KvOffer(source=source, **{**fields, **changes})


class InlineEngine:
    """Runs commands at once, or holds them."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.held: list[Callable[[], None]] | None = None

    def require_relay_instance(self) -> Any:
        return self.instance

    def call(self, command: Callable[[], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()

        def run_command() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        if self.held is None:
            run_command()
        else:
            self.held.append(run_command)
        return future

    call_between_layers = call


async def receiver_of(model: Model) -> tuple[PromptReceiver, InlineEngine]:
    engine = InlineEngine(model.instance())
    receiver = PromptReceiver(engine, group_of(PROMPT), PACK_ID, None)  # type: ignore[arg-type]
    await receiver.reserve()
    return receiver, engine


async def receive(receiver: PromptReceiver, offer: decode_pb2.KvOffer) -> int:
    worker: Any = SimpleNamespace(receiver=node(), transport=TcpTransport(), settings=SimpleNamespace(host_id=""))
    with ThreadPoolExecutor(1) as threads:
        return await receiver.receive(offer, worker, threads)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"block_tokens": 0}, "must name its block_tokens"),
        ({"boundary": 9}, "layer boundary 9"),
        ({"pack_id": "pack-2"}, "of other tokens, or of another pack"),
        ({"context_digests": context_digests(group_of(PROMPT[::-1]))}, "of other tokens"),
        ({"context_digests": []}, "of other tokens"),
    ],
)
async def test_prompt_of_another_offer_is_computed_from_its_beginning(
    model: Model, changes: dict[str, Any], why: str
) -> None:
    receiver, engine = await receiver_of(model)
    with pytest.raises((DataCorrupted, InvalidRequest), match=why):
        await receive(receiver, offer_of(**changes))
    await receiver.start_over()
    assert outputs(run(engine.instance))["r/0", 0] == model.expected(PROMPT)


async def test_import_does_nothing_once_its_instance_is_gone(model: Model) -> None:
    receiver, engine = await receiver_of(model)
    engine.instance = object()
    with pytest.raises(Conflict, match="was unloaded"):
        await receive(receiver, offer_of())
    with pytest.raises(Conflict, match="was unloaded"):
        await receiver.start_over()


async def test_prompt_of_a_silent_source_is_computed_from_its_beginning(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_moves, "_STALL_S", 0.05)
    receiver, engine = await receiver_of(model)
    with silent_listener() as address, pytest.raises(SourcesExhausted, match="host-h"):
        await receive(receiver, offer_of(address))
    await receiver.start_over()
    assert outputs(run(engine.instance))["r/0", 0] == model.expected(PROMPT)


class Source:
    """A worker that keeps a prompt at its second layer."""

    def __init__(self, model: Model) -> None:
        self.instance: Instance = half_loaded(model, 2)
        self.engine = InlineEngine(self.instance)
        self.buffers: dict[str, Any] = {}
        self.cancel = self.instance.cancel
        self.tasks: list[asyncio.Task[None]] = []
        self.budget = ByteBudget(1 << 30)
        self.recalled = RecalledPrompts(self, self.budget)  # type: ignore[arg-type]
        self.instance.prefill(group_of(PROMPT))
        run(self.instance)
        self.recalled.keep("r/0")

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def until_dropped(self) -> None:
        await eventually(lambda: not self.buffers, "the end of the buffer")
        assert "r/0" not in self.recalled and not self.instance.groups() and not self.budget.num_granted


async def test_offer_ends_with_its_instance(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may be another model's by then."""
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    source = Source(model)
    exported = await source.recalled.export("r/0", BUFFER_ID)
    assert exported.layout.shape.num_layers == 2
    buffer, source.engine.held = source.buffers[BUFFER_ID], []
    await eventually(lambda: source.engine.held, "the first piece")
    source.engine.held[0]()
    await eventually(lambda: len(source.engine.held or ()) == 2, "the second piece")
    source.engine.instance = half_loaded(model, 2)
    source.engine.held[1]()
    await source.until_dropped()
    ready = buffer.ready_flags()
    assert 0 < sum(ready) < buffer.num_chunks
    with pytest.raises(BufferLost, match="was unloaded"):
        buffer.wait_any([ready.index(0)], HANG_S)


@pytest.mark.parametrize("hangs", [False, True])
async def test_offer_that_is_not_taken_or_not_copied_is_given_up(
    model: Model, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    source = Source(model)
    monkeypatch.setattr(prompt_moves, "_KEPT_S", 0.05)
    await source.recalled.export("r/0", BUFFER_ID)
    buffer, source.engine.held = source.buffers[BUFFER_ID], [] if hangs else None
    with pytest.raises(Conflict, match="nothing is kept"):
        await source.recalled.export("r/0", BUFFER_ID)
    assert "r/0" in source.recalled
    await source.until_dropped()
    assert all(buffer.ready_flags()) != hangs
    if hangs:
        with pytest.raises(BufferLost, match="not copied"):
            buffer.wait_any([0], HANG_S)


async def test_prompt_is_freed_once_copied_and_its_copy_when_its_stream_ends(model: Model) -> None:
    source = Source(model)
    exported = await source.recalled.export("r/0", BUFFER_ID)
    buffer = source.buffers[BUFFER_ID]
    chunks = [bytes(exported.read(index)) for index in range(buffer.num_chunks)]
    await eventually(lambda: not source.instance.groups(), "the end of the prompt")
    assert source.buffers and source.budget.num_granted == exported.layout.num_kv_bytes
    assert [bytes(buffer.chunk(index)) for index in range(buffer.num_chunks)] == chunks
    buffer.release("stream")  # the receiver has everything, or its attempt was cancelled
    await source.until_dropped()


async def test_offer_ends_if_its_copy_fails(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a device had no memory for it. A receiver that waited on would keep its request from starting over."""
    source = Source(model)
    exported = await source.recalled.export("r/0", BUFFER_ID)
    buffer = source.buffers[BUFFER_ID]
    monkeypatch.setattr(exported, "read", Mock(side_effect=RuntimeError("out of memory")))
    await source.until_dropped()
    with pytest.raises(BufferLost, match="out of memory"):
        buffer.wait_any([0], HANG_S)
    assert isinstance(source.tasks[0].exception(), RuntimeError)


async def test_receiver_holds_at_most_two_pieces(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no more chunks while the engine has not copied the piece before the last."""
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 12)
    receiver, engine = await receiver_of(model)
    num_taken = num_copied = 0

    def copy() -> None:
        nonlocal num_copied
        num_copied += 1

    def take_chunks(kv_receiver: KvReceiver[Any], write: Callable[..., None], stall_s: float) -> bytes:
        nonlocal num_taken
        for _ in range(kv_receiver.kv_import.layout.num_chunks):
            num_taken += 1
            write(copy, threading.Event())
        return b""

    monkeypatch.setattr(KvReceiver, "receive", take_chunks)
    receiving = asyncio.ensure_future(receive(receiver, offer_of()))
    await asyncio.sleep(0)
    engine.held = []
    num_pieces = 0
    while not receiving.done():
        await eventually(lambda: engine.held or receiving.done(), "a piece, or the end")
        assert num_taken - num_copied <= 2 * receiver._piece_chunks
        if engine.held:
            [run_command] = engine.held
            engine.held.clear()
            run_command()
            num_pieces += 1
    assert await receiving == 1 and num_pieces > 2 and num_copied == num_taken
