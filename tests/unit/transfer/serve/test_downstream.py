"""How long a stream lives: it ends with its ticket, and gives up its place when it wants nothing and others wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.unit.transfer.loopback_holders import (
    CLUSTER_KEY,
    FixedBuffer,
    PackSink,
    eventually,
    make_pack,
    receiver,
    serving,
    source_at,
)
from torchrelay.transfer.buffers import Buffer
from torchrelay.transfer.errors import SourceClosed, SourcesExhausted, TicketExpired
from torchrelay.transfer.fetch.follow import fetch_head, follow
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.protocol.frames import FrameKind
from torchrelay.transfer.protocol.tickets import derive_node_key
from torchrelay.transfer.serve import downstream, holder
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.tcp import TcpTransport

DATA, MANIFEST = make_pack(400_000)
PACK_ID = pack_id_of(MANIFEST.encode())
ALL = range(MANIFEST.num_chunks)
EXPIRES_MS = 1_000
GRACE_MS = int(downstream.EXPIRY_GRACE_S * 1000)


class Clock:
    """A wall clock that stands still."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


@contextmanager
def ageing(buffer: Buffer, clock: Clock, max_streams: int = 8) -> Iterator[HolderServer]:
    key = derive_node_key(CLUSTER_KEY, "host-h")
    find = {buffer.buffer_id: buffer}.get
    server = HolderServer("host-h", key, find, "127.0.0.1", max_streams=max_streams, unix_ms=clock)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def opened(server: HolderServer) -> Iterator[Upstream]:
    """A stream that has been told what there is, and has asked for nothing."""
    source = source_at(server.address, PACK_ID, expires=EXPIRES_MS)
    upstream = Upstream.open(source, receiver(), TcpTransport(), 5.0, None)
    try:
        upstream.gained(upstream.frames.receive_header())
        yield upstream
    finally:
        upstream.close()


def receive_chunk(upstream: Upstream) -> int:
    """The next chunk; whatever the holder tells before it is passed over."""
    while (header := upstream.frames.receive_header()).kind != FrameKind.CHUNK:
        if header.kind == FrameKind.GAINED:
            upstream.gained(header)
        else:
            assert header.kind == FrameKind.ALIVE
    upstream.frames.skip(header.num_bytes)
    return header.chunk


def test_an_open_stream_may_ask_within_the_grace_and_not_after_it() -> None:
    clock = Clock()
    with ageing(FixedBuffer(PACK_ID, DATA, MANIFEST), clock) as server, opened(server) as upstream:
        for index, now_ms in enumerate((0, EXPIRES_MS, EXPIRES_MS + GRACE_MS - 1)):
            clock.now_ms = now_ms
            upstream.ask([index])
            assert receive_chunk(upstream) == index
        clock.now_ms = EXPIRES_MS + GRACE_MS
        upstream.ask([3])
        with pytest.raises(TicketExpired, match=f"{GRACE_MS} ms ago"):
            receive_chunk(upstream)
        assert eventually(lambda: server.num_streams == 0)


def test_a_stream_that_wants_nothing_ends_with_its_ticket() -> None:
    clock = Clock()
    with ageing(FixedBuffer(PACK_ID, DATA, MANIFEST), clock) as server, opened(server) as upstream:
        clock.now_ms = EXPIRES_MS + GRACE_MS
        with pytest.raises(TicketExpired):
            upstream.frames.receive_header()
        assert eventually(lambda: server.num_streams == 0)


def test_what_was_asked_in_time_still_comes() -> None:
    clock, sent = Clock(), FixedBuffer(PACK_ID, DATA, MANIFEST, published=0)
    with ageing(sent, clock) as server, opened(server) as upstream:
        upstream.ask([0])
        assert upstream.frames.receive_header().kind == FrameKind.ALIVE  # so it was read
        clock.now_ms = EXPIRES_MS + GRACE_MS
        sent.publish(0, sent.pieces[0])
        assert receive_chunk(upstream) == 0


@pytest.mark.parametrize("has_another", [True, False])
def test_a_follower_whose_ticket_ran_out_goes_on_with_its_other_sources(has_another: bool) -> None:
    clock, sink = Clock(), PackSink(PACK_ID, DATA, MANIFEST)
    first = FixedBuffer(PACK_ID, DATA, MANIFEST, published=10)
    other = FixedBuffer(PACK_ID, DATA, MANIFEST)
    with ageing(first, clock) as server, serving(other, holder_id="host-2") as alternate:
        sources = [source_at(server.address, PACK_ID, expires=EXPIRES_MS)]
        if has_another:
            sources.append(source_at(alternate.address, PACK_ID, "host-2"))
        stream = follow(PACK_ID, ALL, sources, sink, receiver())
        assert next(stream) == 0
        clock.now_ms = EXPIRES_MS + GRACE_MS
        if has_another:
            assert sorted([0, *stream]) == list(ALL)
            assert sink.bytes_held == DATA and len(sink.accepted) == len(ALL)
            return
        for index in range(10, len(ALL)):
            first.publish(index, first.pieces[index])
        with pytest.raises(SourcesExhausted) as exhausted:
            list(stream)
    assert [type(cause) for _, cause in exhausted.value.failures] == [TicketExpired]
    assert 0 < len(sink.accepted) < len(ALL)  # what was asked before it ran out


def test_when_no_place_is_left_the_stream_that_is_idle_longest_gives_up_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holder, "IDLE_S", 0.3)
    sent = FixedBuffer(PACK_ID, DATA, MANIFEST, published=1)
    with ageing(sent, Clock(), max_streams=2) as server, opened(server) as idle, opened(server) as waiting:
        waiting.ask([1])  # not there yet: it waits, and is not idle
        source = source_at(server.address, PACK_ID)
        assert fetch_head(source, receiver(), stall_s=5.0) == MANIFEST.encode()
        with pytest.raises((SourceClosed, OSError)):
            idle.frames.receive_header()
        sent.publish(1, sent.pieces[1])
        assert receive_chunk(waiting) == 1


def test_an_idle_stream_keeps_its_place_while_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder, "IDLE_S", 0.05)
    with ageing(FixedBuffer(PACK_ID, DATA, MANIFEST), Clock(), max_streams=3) as server, opened(server) as idle:
        assert fetch_head(source_at(server.address, PACK_ID), receiver()) == MANIFEST.encode()
        threading.Event().wait(0.3)
        idle.ask([5])
        assert receive_chunk(idle) == 5


def test_a_holder_without_a_place_closes_at_once() -> None:
    with ageing(FixedBuffer(PACK_ID, DATA, MANIFEST), Clock(), max_streams=1) as server, opened(server):
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 1.0
