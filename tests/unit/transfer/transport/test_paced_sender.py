"""Pacing on real sockets: what the kernel is told, and when it is left alone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from torchrelay.transfer.transport.congestion_window import INITIAL_WINDOW_BYTES, MAX_WINDOW_BYTES
from torchrelay.transfer.transport.interface import TransferClass
from torchrelay.transfer.transport.paced_sender import PacedSender, can_pace
from torchrelay.transfer.transport.tcp import TcpConnection


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends with addresses of their own, as between hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        far, _ = listener.accept()
    with near, far:
        yield near, far


def drain(end: socket.socket, received: bytearray) -> None:
    while data := end.recv(1 << 20):
        received += data


def test_window_bounds_send_buffer_and_keeps_order(
    link: tuple[socket.socket, socket.socket],
) -> None:
    near, far = link
    assert can_pace(near)
    received = bytearray()
    receiving = threading.Thread(target=drain, args=(far, received))
    receiving.start()
    sender = PacedSender(near, TransferClass.URGENT)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == INITIAL_WINDOW_BYTES
    data = bytes(range(256)) * (32 << 10)
    pending = memoryview(data)
    while pending:
        num_sent = sender.sendmsg([pending[:100], pending[100:]])
        assert num_sent <= 1 << 20
        pending = pending[num_sent:]
    near.shutdown(socket.SHUT_WR)
    receiving.join()
    assert received == data


def test_unread_bytes_limited_to_window(
    link: tuple[socket.socket, socket.socket],
) -> None:
    near, far = link
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sender = PacedSender(near, TransferClass.IDLE)
    near.setblocking(False)
    taken = 0
    with pytest.raises(BlockingIOError):
        while True:
            taken += sender.sendmsg([memoryview(bytes(1 << 20))])
    assert taken < MAX_WINDOW_BYTES
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * INITIAL_WINDOW_BYTES


def test_same_host_transfers_are_not_paced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        assert not can_pace(near)
        before = near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        TcpConnection(near).set_class(TransferClass.IDLE)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def test_class_changes_on_broken_connection(
    link: tuple[socket.socket, socket.socket],
) -> None:
    near, far = link
    connection = TcpConnection(near)
    for transfer_class in (TransferClass.IDLE, TransferClass.URGENT, TransferClass.KV):
        connection.set_class(transfer_class)
        connection.send([b"one", b"", b"two"])
        assert far.recv(6, socket.MSG_WAITALL) == b"onetwo"
    connection.close()
    connection.set_class(TransferClass.URGENT)
