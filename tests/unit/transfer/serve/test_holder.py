"""The holder's server: leases, late buffers, garbage from peers, limits, and shutting down."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from structlog.testing import capture_logs

from tests.support.wait import HANG_S, wait_until
from tests.unit.transfer.loopback_holders import FixedBuffer, SamplePack, receiver, serving
from torchrelay.transfer.errors import SourceClosed, SourceStalled, UnknownBuffer
from torchrelay.transfer.fetch.follow import FollowOptions, fetch_head
from torchrelay.transfer.protocol import frames
from torchrelay.transfer.serve.holder import HolderLimits, HolderServer
from torchrelay.transfer.transport.tcp import TcpTransport, split_address

PACK = SamplePack(40_000)


class LeasedBuffer(FixedBuffer):
    """Records the owners of its leases."""

    def __init__(self, gone: bool = False) -> None:
        super().__init__(PACK)
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


def test_leased_buffer_held_for_each_stream() -> None:
    leased = LeasedBuffer()
    with serving(leased) as holder:
        assert fetch_head(PACK.source(holder.address), receiver()) == PACK.head
        wait_until(lambda: not leased.owners)
        assert leased.num_leases == 1
    with serving(LeasedBuffer(gone=True)) as holder, pytest.raises(UnknownBuffer, match="just now"):
        fetch_head(PACK.source(holder.address), receiver())


def test_holder_waits_for_late_buffer() -> None:
    answers = iter([None, None, PACK.buffer()])
    with serving(find=lambda _: next(answers), limits=HolderLimits(find_timeout_s=HANG_S)) as holder:
        assert fetch_head(PACK.source(holder.address), receiver()) == PACK.head


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"TRF1" + b"\xff" * 60, bytes(48)])
def test_garbage_ends_only_its_connection(greeting: bytes) -> None:
    with serving(PACK.buffer()) as holder:
        with socket.create_connection(split_address(holder.address), timeout=HANG_S) as caller:
            caller.sendall(greeting)
            with suppress(OSError):  # it has disconnected already
                caller.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while caller.recv(1 << 16):
                    pass
        wait_until(lambda: holder.num_streams == 0)
        assert fetch_head(PACK.source(holder.address), receiver()) == PACK.head


def test_trickling_handshake_cut_off() -> None:
    with serving(PACK.buffer(), limits=HolderLimits(handshake_s=0.3)) as holder:
        with socket.create_connection(split_address(holder.address)) as caller:
            caller.settimeout(0.05)
            num_sent, ended = 0, False
            while not ended and num_sent < frames.HEADER_BYTES - 1:  # one header would take over 2 s
                try:
                    caller.sendall(b"T")  # each byte arrives before the silence is too long
                    num_sent += 1
                    ended = caller.recv(1) is not None
                except TimeoutError:
                    continue
                except OSError:
                    ended = True
        assert ended
        wait_until(lambda: holder.num_streams == 0)


def test_listener_survives_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "stream":
            monkeypatch.setattr(threading.Thread, "start", start)
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(PACK.buffer()) as holder:
        monkeypatch.setattr(threading.Thread, "start", refuse_once)
        with pytest.raises((SourceClosed, OSError)):
            fetch_head(PACK.source(holder.address), receiver())
        assert fetch_head(PACK.source(holder.address), receiver()) == PACK.head


def test_holder_never_started_closes() -> None:
    server = HolderServer("host-h", b"k" * 32, lambda _: None, TcpTransport().listen("127.0.0.1", 0))
    assert server.address.startswith("127.0.0.1:")
    server.close()


def test_connections_beyond_stream_limit_wait() -> None:
    with serving(PACK.buffer(1), limits=HolderLimits(max_streams=1)) as server:
        source = PACK.source(server.address)
        first = PACK.follow([source], PACK.sink(), range(2))
        assert next(first) == 0
        with pytest.raises(SourceStalled):
            fetch_head(source, receiver(), FollowOptions(stall_s=0.3))
        first.close()
        assert fetch_head(source, receiver(), FollowOptions(stall_s=HANG_S)) == PACK.head
    assert server.num_streams == 0


def test_silent_unauthenticated_peers_lose_permits() -> None:
    limits = HolderLimits(max_streams=4, handshake_s=600.0, handshake_grace_s=0.2)
    with capture_logs() as logged, serving(PACK.buffer(), limits=limits) as holder, ExitStack() as peers:
        for _ in range(20):
            peers.enter_context(socket.create_connection(split_address(holder.address)))
        wait_until(lambda: holder.num_streams == 4)
        assert fetch_head(PACK.source(holder.address), receiver(), FollowOptions(stall_s=HANG_S)) == PACK.head
    assert sum(line["num_streams"] for line in logged if line["event"] == "handshakes_ended") >= 17


def test_young_handshake_keeps_permit_until_its_limit() -> None:
    limits = HolderLimits(max_streams=1, handshake_s=3.0, handshake_grace_s=600.0)
    with (
        capture_logs() as logged,
        serving(PACK.buffer(), limits=limits) as holder,
        socket.create_connection(split_address(holder.address)),
    ):
        wait_until(lambda: holder.num_streams == 1)
        assert fetch_head(PACK.source(holder.address), receiver(), FollowOptions(stall_s=HANG_S)) == PACK.head
    # The silent peer's handshake limit freed the permit; nothing ended it earlier.
    assert [line["code"] for line in logged if line["event"] == "stream_refused"] == ["source_stalled"]
    assert not any(line["event"] == "handshakes_ended" for line in logged)
