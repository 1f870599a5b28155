"""Features of TCP alone: addresses, connecting, and a shortage of descriptors."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.wait import HANG_S
from torchrelay.common.host.addresses import join_address
from torchrelay.transfer.transport import tcp
from torchrelay.transfer.transport.interface import Connection, Listener
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
