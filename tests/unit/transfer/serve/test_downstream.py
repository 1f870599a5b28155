"""When a stream ends: with its ticket, or when it is idle and others wait for its permit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.unit.transfer.loopback_holders import (
    FixedBuffer,
    PackSink,
    eventually,
    make_pack,
    receiver,
    serving,
    source_at,
)
from torchrelay.transfer.errors import SourceClosed, SourcesExhausted, TicketExpired
from torchrelay.transfer.fetch.follow import FollowOptions, fetch_head, follow
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.protocol.frames import FrameKind
from torchrelay.transfer.serve import downstream
from torchrelay.transfer.serve.holder import HolderLimits, HolderServer

DATA, MANIFEST = make_pack(400_000)
PACK_ID = pack_id_of(MANIFEST.encode())
ALL = range(MANIFEST.num_chunks)
EXPIRES_MS = 1_000
GRACE_MS = int(downstream.EXPIRY_GRACE_S * 1000)


class Clock:
    """A wall clock set by the test."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


@contextmanager
def opened(server: HolderServer) -> Iterator[Upstream]:
    """A stream that has received HAVE and requested nothing."""
    source = source_at(server.address, PACK_ID, expires=EXPIRES_MS)
    upstream = Upstream.open(source, receiver(), FollowOptions())
    try:
        upstream.gained(upstream.frames.receive_header())
        yield upstream
    finally:
        upstream.close()


def receive_chunk(upstream: Upstream) -> int:
    """The next chunk; announcements before it are skipped."""
    while (header := upstream.frames.receive_header()).kind != FrameKind.CHUNK:
        if header.kind == FrameKind.GAINED:
            upstream.gained(header)
        else:
            assert header.kind == FrameKind.ALIVE
    upstream.frames.skip(header.num_bytes)
    return header.chunk


def test_an_open_stream_may_ask_within_the_grace_and_not_after_it() -> None:
    clock = Clock()
    with serving(FixedBuffer(PACK_ID, DATA, MANIFEST), unix_ms=clock) as server, opened(server) as upstream:
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
    with serving(FixedBuffer(PACK_ID, DATA, MANIFEST), unix_ms=clock) as server, opened(server) as upstream:
        clock.now_ms = EXPIRES_MS + GRACE_MS
        with pytest.raises(TicketExpired):
            upstream.frames.receive_header()
        assert eventually(lambda: server.num_streams == 0)


def test_what_was_asked_in_time_still_comes() -> None:
    clock, sent = Clock(), FixedBuffer(PACK_ID, DATA, MANIFEST, published=0)
    with serving(sent, unix_ms=clock) as server, opened(server) as upstream:
        upstream.ask([0])
        assert upstream.frames.receive_header().kind == FrameKind.ALIVE  # so the request was read
        clock.now_ms = EXPIRES_MS + GRACE_MS
        sent.publish(0, sent.pieces[0])
        assert receive_chunk(upstream) == 0


@pytest.mark.parametrize("has_another", [True, False])
def test_a_follower_whose_ticket_ran_out_goes_on_with_its_other_sources(has_another: bool) -> None:
    clock, sink = Clock(), PackSink(PACK_ID, DATA, MANIFEST)
    first = FixedBuffer(PACK_ID, DATA, MANIFEST, published=10)
    other = FixedBuffer(PACK_ID, DATA, MANIFEST)
    with serving(first, unix_ms=clock) as server, serving(other, holder_id="host-2") as alternate:
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
    assert 0 < len(sink.accepted) < len(ALL)  # requested before the ticket expired


def test_without_a_free_permit_the_stream_that_is_idle_longest_ends() -> None:
    sent, limits = FixedBuffer(PACK_ID, DATA, MANIFEST, published=1), HolderLimits(max_streams=2, idle_s=0.3)
    with serving(sent, limits=limits, unix_ms=Clock()) as server, opened(server) as idle, opened(server) as waiting:
        waiting.ask([1])  # not ready yet: this stream waits and is not idle
        source = source_at(server.address, PACK_ID)
        assert fetch_head(source, receiver()) == MANIFEST.encode()
        with pytest.raises((SourceClosed, OSError)):
            idle.frames.receive_header()
        sent.publish(1, sent.pieces[1])
        assert receive_chunk(waiting) == 1


def test_an_idle_stream_stays_while_nobody_needs_its_permit() -> None:
    sent, limits = FixedBuffer(PACK_ID, DATA, MANIFEST), HolderLimits(max_streams=3, idle_s=0.05)
    with serving(sent, limits=limits, unix_ms=Clock()) as server, opened(server) as idle:
        assert fetch_head(source_at(server.address, PACK_ID), receiver()) == MANIFEST.encode()
        threading.Event().wait(0.3)
        idle.ask([5])
        assert receive_chunk(idle) == 5


def test_a_holder_without_free_permits_closes_at_once() -> None:
    sent, limits = FixedBuffer(PACK_ID, DATA, MANIFEST), HolderLimits(max_streams=1)
    with serving(sent, limits=limits, unix_ms=Clock()) as server, opened(server):
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 1.0
