"""Chunks published one by one, from any thread, until the buffer fails."""

from __future__ import annotations

import threading

import pytest
from blake3 import blake3

from tests.support.wait import HANG_S
from tests.unit.transfer.loopback_holders import Interrupted
from torchrelay.transfer.buffers import BufferLost, LeasedBuffer, MemoryBuffer


def test_chunks_are_ready_once_published() -> None:
    buffer = MemoryBuffer("kv-1", [3, 0, 5])
    assert (buffer.num_chunks, buffer.num_bytes, buffer.head) == (3, 8, b"")
    assert buffer.wait_any([0], 0.0) == []
    buffer.publish(0, b"abc")
    buffer.chunk(2)[:] = b"hello"
    buffer.publish(2)
    assert buffer.wait_any(range(3), 0.0) == [0, 2]
    assert buffer.ready_flags() == b"\1\0\1"
    assert bytes(buffer.chunk(2)) == b"hello"
    assert buffer.digest(2) == blake3(b"hello").digest()
    assert not isinstance(buffer, LeasedBuffer)


def test_bytes_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="different structures"):
        MemoryBuffer("kv-1", [3]).publish(0, b"four")


def test_publish_wakes_waiting_thread() -> None:
    buffer = MemoryBuffer("kv-1", [3])
    woken: list[list[int]] = []
    waiting = threading.Thread(target=lambda: woken.append(buffer.wait_any([0], 200.0)))
    waiting.start()
    buffer.publish(0, b"abc")
    waiting.join(HANG_S)  # far below the wait's own limit
    assert woken == [[0]]


def test_chunk_published_during_scan_keeps_order() -> None:
    buffer = MemoryBuffer("kv-1", [1, 1, 1])
    assert buffer.wait_any(Interrupted(range(3), buffer.publish), 1.0) == [0, 1, 2]


def test_failed_buffer_keeps_its_chunks() -> None:
    buffer = MemoryBuffer("kv-1", [1, 1])
    buffer.publish(0, b"a")
    buffer.fail("the prefill worker is gone")
    assert buffer.wait_any([0], 0.0) == [0]
    with pytest.raises(BufferLost, match="the prefill worker is gone"):
        buffer.wait_any([1], 10.0)
