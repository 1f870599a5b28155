"""Features of TCP alone: addresses and names, connecting, and a shortage of descriptors."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.wait import HANG_S, wait_until
from torchrelay.common.host.addresses import join_address
from torchrelay.transfer.transport import tcp
from torchrelay.transfer.transport.interface import Connection, Listener
from torchrelay.transfer.transport.resolver import Resolver
from torchrelay.transfer.transport.tcp import TcpTransport, split_address


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = TcpTransport(accept_retry_s=0.01).listen("127.0.0.1", 0)
    yield listener
    listener.close()


def test_failed_connection_names_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = join_address(*gone.getsockname())
    with pytest.raises(ConnectionRefusedError, match="cannot connect"):
        TcpTransport().connect(address, timeout_s=5.0)
    for bad in ("", "host", "host:", "host:-1", "host:http"):
        with pytest.raises(ConnectionError, match="form host:port"):
            TcpTransport().connect(bad, timeout_s=5.0)


def test_silent_death_detected_by_both_ends(listener: Listener) -> None:
    connecting = TcpTransport().connect(listener.address, timeout_s=5.0)
    accepted = listener.accept()
    for end in (connecting, accepted):
        assert isinstance(end, tcp.TcpConnection)
        assert end._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert 0 < end._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
        assert 0 < end._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
        end.close()


def test_connecting_stops_and_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = join_address(*full.getsockname())
        with socket.socket() as first, socket.socket() as second:
            for waiting in (first, second):  # after these the queue is full, and no handshake completes
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            with pytest.raises(TimeoutError):
                TcpTransport().connect(address, timeout_s=0.15)
            stop = threading.Event()
            stop.set()
            with pytest.raises(InterruptedError):
                TcpTransport().connect(address, timeout_s=5.0, stop=stop)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 1), ("::1", 65535), ("node-7.internal", 8000)])
def test_addresses_read_back(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


def test_listener_survives_descriptor_shortage(listener: Listener) -> None:
    accepted: list[Connection | None] = []
    waiting = threading.Thread(target=lambda: accepted.append(listener.accept()))
    near = socket.create_connection(split_address(listener.address))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))  # none is left
    try:
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    waiting.join(HANG_S)
    assert accepted and accepted[0] is not None
    accepted[0].close()
    near.close()


look_up = socket.getaddrinfo


class SlowServer:
    """The system's resolver with its servers unreachable: it hangs until ``answer`` is set."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.num_asked = 0

    def __call__(self, host: str, port: int, **options: Any) -> Any:
        if options.get("flags"):
            return look_up(host, port, **options)
        self.num_asked += 1
        self.answer.wait(60.0)
        return look_up("127.0.0.1", port, **options)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowServer]:
    server = SlowServer()
    monkeypatch.setattr(socket, "getaddrinfo", server)
    yield server
    server.answer.set()


def soon(s: float = HANG_S) -> float:
    return time.monotonic() + s


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3"])
def test_address_not_looked_up(away: SlowServer, host: str) -> None:
    family, place = Resolver().resolve(host, 7, soon())
    assert place[:2] == (host, 7)
    assert family == (socket.AF_INET6 if ":" in host else socket.AF_INET)
    assert away.num_asked == 0


def test_name_resolves() -> None:
    family, place = Resolver().resolve("localhost", 7, soon())
    assert place[0] == ("::1" if family == socket.AF_INET6 else "127.0.0.1")


def test_unknown_name_raises() -> None:
    with pytest.raises(OSError, match="has no address"):
        Resolver().resolve(f"{'x' * 70}.invalid", 7, soon())


def test_connect_times_out_without_name_servers(away: SlowServer) -> None:
    with pytest.raises(TimeoutError, match="not resolved in time"):
        TcpTransport().connect("some-host:7", 0.3)
    assert not away.answer.is_set()  # the lookup itself still hangs


def test_stop_ends_lookup_wait(away: SlowServer) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(InterruptedError):
        TcpTransport().connect("other-host:7", 60.0, stop)  # the last test's lookup may still be running


def test_concurrent_callers_share_lookup(away: SlowServer) -> None:
    resolver = Resolver()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            resolver.resolve("some-host", 7, soon(0.02))
    assert away.num_asked == 1
    threading.Timer(0.05, away.answer.set).start()
    assert resolver.resolve("some-host", 7, soon())[1] == ("127.0.0.1", 7)
    assert away.num_asked == 1
    wait_until(lambda: not any(thread.name == "resolve" for thread in threading.enumerate()))
    resolver.resolve("some-host", 7, soon())
    assert away.num_asked == 2  # nothing is cached: names move
