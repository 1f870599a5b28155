"""Frames over a connection that other threads send on and abort."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.support.wait import HANG_S
from torchrelay.transfer.protocol.frame_stream import FrameStream
from torchrelay.transfer.protocol.frames import FrameKind
from torchrelay.transfer.transport.interface import TransferClass


class FullConnection:
    """Its peer accepts nothing: a send blocks until the connection is aborted."""

    def __init__(self) -> None:
        self.sending, self.aborted = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def receive_into(self, view: memoryview) -> int:
        raise TimeoutError

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        self.sending.set()
        self.aborted.wait(HANG_S)
        self.calls.append("sent")

    def set_class(self, transfer_class: TransferClass) -> None:
        return

    def peer_closed(self) -> bool:
        return False

    def abort(self) -> None:
        self.calls.append("aborted")
        self.aborted.set()

    def close(self) -> None:
        self.calls.append("closed")


def test_close_waits_for_senders() -> None:
    connection = FullConnection()
    frames = FrameStream(connection, 1.0)
    sending = threading.Thread(target=frames.send, args=(FrameKind.ALIVE,))
    sending.start()
    assert connection.sending.wait(HANG_S)
    frames.close()
    sending.join()
    assert connection.calls == ["aborted", "sent", "closed"]
    frames.abort()
    assert connection.calls[-1] == "closed"
