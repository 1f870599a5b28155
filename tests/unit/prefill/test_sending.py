"""The prefill role sends KV: its budget of bytes, and the KV of an attempt."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import cast

import pytest

from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.core import Finish, KvBlock, NewToken
from torchrelay.engine.kv.layout import KvLayout, KvShape
from torchrelay.prefill.byte_budget import ByteBudget
from torchrelay.prefill.kv_sender import KvSender, kv_offer
from torchrelay.transfer.buffers import BufferLost
from torchrelay.worker.attempts.attempt import Attempt
from torchrelay.worker.attempts.outbox import Outbox
from torchrelay.worker.role import RoleContext


async def test_requests_are_granted_in_order() -> None:
    budget = ByteBudget(100)
    await budget.acquire(60)
    large, small = (asyncio.ensure_future(budget.acquire(size)) for size in (80, 10))
    await asyncio.sleep(0)
    assert not large.done() and not small.done()  # the small request does not overtake the large one
    budget.release(60)
    await large
    await small
    assert budget.num_granted == 90


async def test_request_above_whole_budget_is_granted_alone() -> None:
    budget = ByteBudget(100)
    await budget.acquire(10)
    huge = asyncio.ensure_future(budget.acquire(500))
    await asyncio.sleep(0)
    assert not huge.done()
    budget.release(10)
    await huge
    assert budget.num_granted == 500
    budget.release(500)
    assert budget.num_granted == 0


async def test_cancelled_wait_takes_nothing() -> None:
    budget = ByteBudget(100)
    await budget.acquire(100)
    waiting, granted = (asyncio.ensure_future(budget.acquire(50)) for _ in range(2))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    budget.release(100)
    granted.cancel()
    await asyncio.gather(granted, return_exceptions=True)
    assert budget.num_granted == 0


SHAPE = KvShape(num_layers=2, num_kv_heads=1, head_dim=4, dtype_bytes=4)


def kv_sender() -> KvSender:
    start = pb.AttemptStart(
        key=types_pb2.AttemptKey(request_id="req-1", attempt=1),
        prompt=[1, 2, 3],
        num_prompt_tokens=3,
        sampling=pb.Sampling(max_tokens=8),
        choices=[pb.ChoiceStart(choice=0), pb.ChoiceStart(choice=1)],
        decode=types_pb2.WorkerRef(worker_id="dec-1", instance_id="ins-2"),
    )
    attempt = Attempt(start, Outbox("gw"), {})
    return KvSender(attempt, KvLayout.of(SHAPE, 2, attempt.group()))


async def test_trailer_is_published_with_last_first_token() -> None:
    sender = kv_sender()
    layout = sender.layout
    for index in range(layout.num_kv_chunks):
        sender.publish(KvBlock("req-1/1", index, memoryview(bytes(layout.chunk_bytes(index)))))
    sender.add_first_token(NewToken("req-1/1", 1, 0, 9, Finish.STOP))
    assert not sender.complete.is_set() and not sender.buffer.ready_flags()[layout.trailer_index]
    sender.add_first_token(NewToken("req-1/1", 0, 0, 7))
    assert sender.complete.is_set()
    tokens = layout.unpack_trailer("req-1/1", sender.buffer.chunk(layout.trailer_index))
    assert [(token.choice, token.token_id, token.finish) for token in tokens] == [(0, 7, None), (1, 9, Finish.STOP)]


async def test_buffer_is_received_when_trailer_stream_ends() -> None:
    """A stream that breaks earlier may be followed by another, also once everything is published."""
    sender = kv_sender()
    for index, chunk_bytes in enumerate(sender.layout.chunk_sizes):
        sender.buffer.publish(index, bytes(chunk_bytes))
    sender.buffer.acquire("dec-1")
    sender.buffer.digest(0)
    sender.buffer.release("dec-1")
    await asyncio.sleep(0)
    assert not sender.received.is_set()
    sender.buffer.acquire("dec-1")
    sender.buffer.digest(sender.layout.trailer_index)
    sender.buffer.release("dec-1")
    async with asyncio.timeout(60):
        await sender.received.wait()


async def test_waiting_reader_of_abandoned_buffer_fails() -> None:
    sender = kv_sender()
    buffer = sender.buffer
    sender.abandon()
    with pytest.raises(BufferLost, match="the attempt ended"):
        buffer.wait_any([0], 1.0)
    assert sender.complete.is_set()


async def test_abandoned_sender_frees_its_buffer_and_ignores_blocks() -> None:
    """The engine computes a prompt on that is kept for another worker."""
    sender = kv_sender()
    buffer = weakref.ref(sender.buffer)
    sender.abandon()
    sender.publish(KvBlock("req-1/1", 0, memoryview(bytes(sender.layout.chunk_bytes(0)))))
    assert buffer() is None


async def test_offer_describes_buffer_layout() -> None:
    settings = SimpleNamespace(worker_id="pre-1")
    worker = SimpleNamespace(settings=settings, data_address="127.0.0.1:9")
    offer = kv_offer(cast(RoleContext, worker), kv_sender().layout, types_pb2.Ticket(), "pack", instance_id="ins-2")
    assert (offer.instance_id, offer.pack_id, offer.block_tokens) == ("ins-2", "pack", 2)
    assert [(list(s.choices), s.num_context_tokens) for s in offer.sequences] == [([0, 1], 3)]
    assert (offer.source.holder_id, offer.source.data_address) == ("pre-1", "127.0.0.1:9")
