"""TCP behind the transport's names: what blocks ends in time, and what broke says so."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from torchrelay.transfer import tcp
from torchrelay.transfer.tcp import TcpTransport, join_address, split_address
from torchrelay.transfer.transport import Connection, Listener


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = TcpTransport().listen("127.0.0.1", 0)
    yield made
    made.close()


def pair(listener: Listener) -> tuple[Connection, Connection]:
    near = TcpTransport().connect(listener.address, timeout_s=5.0)
    far = listener.accept()
    assert far is not None
    return near, far


def receive(connection: Connection, num_bytes: int) -> bytes:
    view, done = memoryview(bytearray(num_bytes)), 0
    while done < num_bytes:
        done += connection.receive_into(view[done:])
    return bytes(view)


def test_parts_arrive_in_order_however_many_and_large(listener: Listener) -> None:
    near, far = pair(listener)
    parts = [bytes([number]) * size for number, size in enumerate([1, 0, 3 << 20, 7, 1 << 20])]
    sending = threading.Thread(target=near.send, args=(parts,))
    sending.start()
    assert receive(far, sum(map(len, parts))) == b"".join(parts)
    sending.join()
    near.close()
    assert far.receive_into(memoryview(bytearray(1))) == 0
    far.close()


def test_a_receive_lets_its_caller_look_around(listener: Listener) -> None:
    near, far = pair(listener)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        near.receive_into(memoryview(bytearray(1)))
    assert 0.05 < time.monotonic() - begin < 1.0
    near.close()
    far.close()


def test_a_peer_that_takes_nothing_is_given_up(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "SEND_TIMEOUT_S", 0.1)
    near, far = pair(listener)
    with pytest.raises(TimeoutError, match="taken nothing"):
        near.send([bytes(64 << 20)])
    near.close()
    far.close()


def test_aborting_wakes_the_thread_that_is_blocked(listener: Listener) -> None:
    near, far = pair(listener)
    failed: list[OSError] = []

    def send() -> None:
        try:
            near.send([bytes(64 << 20)])
        except OSError as error:
            failed.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    near.abort()
    sending.join(5.0)
    assert failed
    near.close()
    far.close()


def test_a_closed_listener_accepts_no_more(listener: Listener) -> None:
    accepted: list[Connection | None] = []
    accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
    accepting.start()
    listener.close()
    accepting.join(5.0)
    assert accepted == [None]


def test_connecting_fails_with_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = join_address(*gone.getsockname())
    with pytest.raises(ConnectionRefusedError, match="cannot connect"):
        TcpTransport().connect(address, timeout_s=5.0)
    for bad in ("", "host", "host:", "host:-1", "host:http"):
        with pytest.raises(ConnectionError, match="form host:port"):
            TcpTransport().connect(bad, timeout_s=5.0)


def test_connecting_stops_and_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = join_address(*full.getsockname())
        with socket.socket() as first, socket.socket() as second:
            for waiting in (first, second):  # after these the queue is full, and no handshake ends
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


def test_a_listener_outlives_a_shortage_of_descriptors(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "ACCEPT_AGAIN_S", 0.01)
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
    waiting.join(5)
    assert accepted and accepted[0] is not None
    accepted[0].close()
    near.close()
