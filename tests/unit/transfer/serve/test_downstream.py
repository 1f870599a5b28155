"""Streams of a holder: requested chunks in order, and the end with the ticket or when other connections wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.wait import wait_until
from tests.unit.transfer.loopback_holders import SamplePack, receiver, serving
from torchrelay.transfer.errors import SourceClosed, SourcesExhausted, TicketExpired
from torchrelay.transfer.fetch.follow import FollowOptions, fetch_head
from torchrelay.transfer.fetch.upstream import Upstream
from torchrelay.transfer.protocol.frames import FrameKind
from torchrelay.transfer.serve import downstream
from torchrelay.transfer.serve.holder import HolderLimits, HolderServer
from torchrelay.transfer.serve.send_queue import SendQueue

PACK = SamplePack(400_000)
ALL = list(PACK.chunks)
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
    source = PACK.source(server.address, expires=EXPIRES_MS)
    upstream = Upstream.open(source, receiver(), FollowOptions())
    try:
        upstream.gained(upstream.frames.receive_header())
        yield upstream
    finally:
        upstream.close()


def receive_chunk(upstream: Upstream) -> int:
    """The number of the next chunk; skips announcements before it."""
    while (header := upstream.frames.receive_header()).kind != FrameKind.CHUNK:
        if header.kind == FrameKind.GAINED:
            upstream.gained(header)
        else:
            assert header.kind == FrameKind.ALIVE
    upstream.frames.skip(header.num_bytes)
    return header.chunk


def test_expired_ticket_allows_requests_within_grace() -> None:
    clock = Clock()
    with serving(PACK.buffer(), unix_ms=clock) as server, opened(server) as upstream:
        for index, now_ms in enumerate((0, EXPIRES_MS, EXPIRES_MS + GRACE_MS - 1)):
            clock.now_ms = now_ms
            upstream.ask([index])
            assert receive_chunk(upstream) == index
        clock.now_ms = EXPIRES_MS + GRACE_MS
        upstream.ask([3])
        with pytest.raises(TicketExpired, match=f"{GRACE_MS} ms ago"):
            receive_chunk(upstream)
        wait_until(lambda: server.num_streams == 0)


def test_stream_without_requests_ends_with_ticket() -> None:
    clock = Clock()
    with serving(PACK.buffer(), unix_ms=clock) as server, opened(server) as upstream:
        clock.now_ms = EXPIRES_MS + GRACE_MS
        with pytest.raises(TicketExpired):
            upstream.frames.receive_header()
        wait_until(lambda: server.num_streams == 0)


def test_chunk_requested_before_expiry_still_sent() -> None:
    clock, sent = Clock(), PACK.buffer(0)
    with serving(sent, unix_ms=clock) as server, opened(server) as upstream:
        upstream.ask([0])
        assert upstream.frames.receive_header().kind == FrameKind.ALIVE  # so the request was read
        clock.now_ms = EXPIRES_MS + GRACE_MS
        sent.show(0)
        assert receive_chunk(upstream) == 0


@pytest.mark.parametrize("has_alternate", [True, False])
def test_follower_with_expired_ticket_uses_alternate(has_alternate: bool) -> None:
    clock, sink, first = Clock(), PACK.sink(), PACK.buffer(10)
    with serving(first, unix_ms=clock) as server, serving(PACK.buffer(), holder_id="host-2") as alternate:
        sources = [PACK.source(server.address, expires=EXPIRES_MS)]
        if has_alternate:
            sources.append(PACK.source(alternate.address, "host-2"))
        stream = PACK.follow(sources, sink)
        assert next(stream) == 0
        clock.now_ms = EXPIRES_MS + GRACE_MS
        if has_alternate:
            assert sorted([0, *stream]) == ALL
            assert sink.bytes_held == PACK.data and len(sink.accepted) == len(ALL)
            return
        first.show(*ALL[10:])
        with pytest.raises(SourcesExhausted) as exhausted:
            list(stream)
    assert [type(cause) for _, cause in exhausted.value.failures] == [TicketExpired]
    assert 0 < len(sink.accepted) < len(ALL)  # requested before the ticket expired


def test_longest_idle_stream_ends_when_permits_run_out() -> None:
    sent, limits = PACK.buffer(1), HolderLimits(max_streams=2, idle_s=0.3)
    with serving(sent, limits=limits, unix_ms=Clock()) as server, opened(server) as idle, opened(server) as waiting:
        waiting.ask([1])  # not ready yet: this stream waits and is not idle
        assert fetch_head(PACK.source(server.address), receiver()) == PACK.head
        with pytest.raises((SourceClosed, OSError)):
            idle.frames.receive_header()
        sent.show(1)
        assert receive_chunk(waiting) == 1


def test_idle_stream_stays_while_permits_are_free() -> None:
    limits = HolderLimits(max_streams=3, idle_s=0.0)
    with serving(PACK.buffer(), limits=limits, unix_ms=Clock()) as server, opened(server) as idle:
        assert fetch_head(PACK.source(server.address), receiver()) == PACK.head
        idle.ask([5])
        assert receive_chunk(idle) == 5


def test_holder_without_free_permits_closes() -> None:
    with (
        serving(PACK.buffer(), limits=HolderLimits(max_streams=1), unix_ms=Clock()) as server,
        opened(server) as upstream,
    ):
        server.close()
        assert server.num_streams == 0
        with pytest.raises((SourceClosed, OSError)):
            upstream.frames.receive_header()


def test_chunks_are_wanted_in_order_and_once() -> None:
    wanted = SendQueue()
    assert wanted.pending(0.0) == []
    wanted.add([5, 6, 7])
    wanted.add([6, 1])
    assert wanted.pending(0.0) == [5, 6, 7, 1]
    wanted.cancel([6, 99])
    assert wanted.take(5)
    assert not wanted.take(6)
    assert wanted.pending(0.0) == [7, 1]


def test_pending_wakes_on_request_and_on_end() -> None:
    wanted = SendQueue()
    later = threading.Timer(0.05, wanted.add, ([3],))
    later.start()
    assert wanted.pending(10.0) == [3]
    wanted.end(ConnectionResetError("gone"))
    wanted.end(OSError("too late to matter"))
    with pytest.raises(ConnectionResetError, match="gone"):
        wanted.pending(10.0)
    later.join()
