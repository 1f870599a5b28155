"""The holder's side: leases, late buffers, ranges, garbage from peers, and shutting down."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from structlog.testing import capture_logs

from tests.unit.transfer.loopback_holders import (
    FixedBuffer,
    PackSink,
    eventually,
    make_pack,
    receiver,
    serving,
    source_at,
)
from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.errors import SourceClosed, SourcesExhausted, SourceStalled, UnknownBuffer
from torchrelay.transfer.fetch.follow import FollowOptions, fetch_head, follow
from torchrelay.transfer.manifest import pack_id_of
from torchrelay.transfer.serve.holder import HolderLimits, HolderServer
from torchrelay.transfer.transport.tcp import TcpTransport, split_address

DATA, MANIFEST = make_pack(40_000)
PACK_ID = pack_id_of(MANIFEST.encode())


class LeasedBuffer(FixedBuffer):
    """Records who reads it."""

    def __init__(self, gone: bool = False) -> None:
        super().__init__(PACK_ID, DATA, MANIFEST)
        self.owners: set[str] = set()
        self.num_leases = 0
        self._gone = gone

    def acquire(self, owner: str) -> None:
        if self._gone:
            raise UnknownBuffer("evicted just now")
        self.owners.add(owner)
        self.num_leases += 1

    def release(self, owner: str) -> None:
        self.owners.remove(owner)


def test_a_leased_buffer_is_held_for_as_long_as_it_is_read() -> None:
    leased = LeasedBuffer()
    with serving(leased) as holder:
        source = source_at(holder.address, PACK_ID)
        assert fetch_head(source, receiver()) == MANIFEST.encode()
        assert eventually(lambda: not leased.owners)
        assert leased.num_leases == 1
    with serving(LeasedBuffer(gone=True)) as holder, pytest.raises(UnknownBuffer, match="just now"):
        fetch_head(source_at(holder.address, PACK_ID), receiver())


def test_a_buffer_may_appear_after_it_was_asked_for() -> None:
    begin = time.monotonic()

    def find(buffer_id: str) -> MemoryBuffer | None:
        return FixedBuffer(PACK_ID, DATA, MANIFEST) if time.monotonic() - begin > 0.1 else None

    with serving(find=find) as holder:
        assert fetch_head(source_at(holder.address, PACK_ID), receiver()) == MANIFEST.encode()


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"TRF1" + b"\xff" * 60, bytes(48)])
def test_garbage_from_a_peer_costs_nothing(greeting: bytes) -> None:
    with serving(FixedBuffer(PACK_ID, DATA, MANIFEST)) as holder:
        host, port = holder.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=5.0) as caller:
            caller.sendall(greeting)
            with suppress(OSError):  # it has hung up already
                caller.shutdown(socket.SHUT_WR)
            while True:
                try:
                    if not caller.recv(1 << 16):
                        break
                except ConnectionResetError:
                    break
        assert eventually(lambda: holder.num_streams == 0)
        assert fetch_head(source_at(holder.address, PACK_ID), receiver()) == MANIFEST.encode()


def test_a_handshake_that_trickles_in_is_cut_off() -> None:
    with serving(FixedBuffer(PACK_ID, DATA, MANIFEST), limits=HolderLimits(handshake_s=0.3)) as holder:
        with socket.create_connection(split_address(holder.address)) as caller:
            caller.settimeout(0.05)
            begin = time.monotonic()
            ended = False
            while not ended and time.monotonic() - begin < 1.5:  # one header takes 2.4 s
                try:
                    caller.sendall(b"T")  # each byte arrives before the silence is too long
                    ended = caller.recv(1) is not None
                except TimeoutError:
                    continue
                except OSError:
                    ended = True
        assert ended
        assert eventually(lambda: holder.num_streams == 0)


def test_the_listener_stays_open_when_the_system_is_out_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "stream":
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(FixedBuffer(PACK_ID, DATA, MANIFEST)) as holder:
        monkeypatch.setattr(threading.Thread, "start", refuse_once)
        with pytest.raises((SourceClosed, OSError)):
            fetch_head(source_at(holder.address, PACK_ID), receiver())
        assert fetch_head(source_at(holder.address, PACK_ID), receiver()) == MANIFEST.encode()


def test_closing_ends_streams_that_wait() -> None:
    with serving(FixedBuffer(PACK_ID, DATA, MANIFEST, published=1)) as holder:
        stream = follow(
            PACK_ID, range(2), [source_at(holder.address, PACK_ID)], PackSink(PACK_ID, DATA, MANIFEST), receiver()
        )
        assert next(stream) == 0
        begin = time.monotonic()
        holder.close()
        assert time.monotonic() - begin < 1.0
        assert holder.num_streams == 0
        with pytest.raises(SourcesExhausted):
            next(stream)


def test_a_holder_that_never_started_closes() -> None:
    server = HolderServer("host-h", b"k" * 32, lambda _: None, TcpTransport().listen("127.0.0.1", 0))
    assert server.address.startswith("127.0.0.1:")
    server.close()


def test_many_followers_at_once() -> None:
    sent = FixedBuffer(PACK_ID, DATA, MANIFEST)
    sinks = [PackSink(PACK_ID, DATA, MANIFEST) for _ in range(8)]
    with serving(sent) as holder:
        source = source_at(holder.address, PACK_ID)
        threads = [
            threading.Thread(target=lambda sink=sink: list(follow(PACK_ID, range(10), [source], sink, receiver())))
            for sink in sinks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert eventually(lambda: holder.bytes_sent == 8 * len(DATA))
    assert all(sink.bytes_held == DATA for sink in sinks)


def test_streams_beyond_the_limit_wait_for_their_turn() -> None:
    sent = FixedBuffer(PACK_ID, DATA, MANIFEST, published=1)
    with serving(sent, limits=HolderLimits(max_streams=1)) as server:
        source = source_at(server.address, PACK_ID)
        first = follow(PACK_ID, range(2), [source], PackSink(PACK_ID, DATA, MANIFEST), receiver())
        assert next(first) == 0
        with pytest.raises(SourceStalled):
            fetch_head(source, receiver(), FollowOptions(stall_s=0.3))
        first.close()
        begin = time.monotonic()
        assert fetch_head(source, receiver()) == MANIFEST.encode()
        assert time.monotonic() - begin < 1.0
    assert server.num_streams == 0


def test_strangers_who_say_nothing_hold_no_place_for_long() -> None:
    limits = HolderLimits(max_streams=4, handshake_s=600.0, handshake_grace_s=0.2)
    sent = FixedBuffer(PACK_ID, DATA, MANIFEST)
    with capture_logs() as logged, serving(sent, limits=limits) as holder, ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(socket.create_connection(split_address(holder.address)))
        assert eventually(lambda: holder.num_streams == 4)
        assert fetch_head(source_at(holder.address, PACK_ID), receiver()) == MANIFEST.encode()
    assert sum(line["num_streams"] for line in logged if line["event"] == "handshakes_ended") >= 17


def test_a_peer_is_not_cut_off_while_its_handshake_is_young() -> None:
    limits = HolderLimits(max_streams=1, handshake_s=1.0, handshake_grace_s=600.0)
    with serving(FixedBuffer(PACK_ID, DATA, MANIFEST), limits=limits) as holder:
        with socket.create_connection(split_address(holder.address)):
            assert eventually(lambda: holder.num_streams == 1)
            begin = time.monotonic()
            assert fetch_head(source_at(holder.address, PACK_ID), receiver()) == MANIFEST.encode()
        assert time.monotonic() - begin > 0.7  # it waited for the other's time to end
