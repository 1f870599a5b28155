"""Requested chunks: in order, once, until cancelled or sent."""

from __future__ import annotations

import threading

import pytest

from torchrelay.transfer.serve.send_queue import SendQueue


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
