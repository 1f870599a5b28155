"""Filling from the remote store: every good chunk comes, damaged ones are named, a stop ends it."""

from __future__ import annotations

import threading

import pytest
from blake3 import blake3

from torchrelay.common.errors import DataCorrupted, Unavailable
from torchrelay.param_store.copies.remote_download import download_from_remote
from torchrelay.param_store.remote.remote_store import RangeReader
from torchrelay.transfer.buffers import MemoryBuffer

CHUNK_BYTES = 100
DATA = bytes(range(256)) * 4


class Bytes(RangeReader):
    """Reads from ``again`` after damaged bytes."""

    def __init__(self, data: bytes, again: bytes | None = None) -> None:
        self.data, self.again = data, again

    def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        if offset + len(view) > len(self.data):
            raise DataCorrupted("too short")
        view[:] = self.data[offset : offset + len(view)]

    def read_again(self, offset: int, view: memoryview, stop: threading.Event) -> bool:
        if self.again is not None:
            view[:] = self.again[offset : offset + len(view)]
        return self.again is not None

    def close(self) -> None: ...


class Expecting(MemoryBuffer):
    """A sink that knows the digests of DATA."""

    def __init__(self) -> None:
        super().__init__("p", [min(CHUNK_BYTES, len(DATA) - begin) for begin in range(0, len(DATA), CHUNK_BYTES)])

    def digest(self, index: int) -> bytes:
        return blake3(DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]).digest()

    def accept(self, index: int) -> None:
        self.publish(index)

    def published(self) -> set[int]:
        return {index for index in range(self.num_chunks) if self.ready_flags()[index]}


def fill(data: bytes, wanted: list[int], stop_after: int = 1000, again: bytes | None = None) -> Expecting:
    sink, stop, seen = Expecting(), threading.Event(), list[int]()

    def on_chunk(index: int) -> None:
        seen.append(index)
        if len(seen) >= stop_after:
            stop.set()

    try:
        download_from_remote("p", Bytes(data, again), CHUNK_BYTES, sink, wanted, stop, on_chunk, lambda: None, 3)
    finally:
        assert set(seen) == sink.published()
    return sink


def test_only_wanted_chunks_downloaded() -> None:
    assert fill(DATA, [7, 2, 10]).published() == {7, 2, 10}
    sink = fill(DATA, list(range(11)))
    assert b"".join(bytes(sink.chunk(i)) for i in range(sink.num_chunks)) == DATA


def test_damaged_chunks_skipped_and_named() -> None:
    damaged = bytearray(DATA)
    damaged[350] ^= 1
    damaged[1000] ^= 1
    with pytest.raises(DataCorrupted, match=r"pack p is damaged in the remote store: 2 chunks \(3, 10\)"):
        fill(bytes(damaged), list(range(11)))


def test_damaged_chunk_read_again() -> None:
    damaged = bytearray(DATA)
    damaged[350] ^= 1
    assert fill(bytes(damaged), list(range(11)), again=DATA).published() == set(range(11))
    with pytest.raises(DataCorrupted, match=r"pack p is damaged in the remote store: 1 chunk \(3\)"):
        fill(bytes(damaged), list(range(11)), again=bytes(damaged))


def test_interrupted_reader_is_no_failure() -> None:
    stop = threading.Event()

    class Interrupted(Bytes):
        def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
            stop.set()
            raise Unavailable("stopped")

    download_from_remote(
        "p", Interrupted(DATA), CHUNK_BYTES, Expecting(), range(11), stop, lambda index: None, lambda: None, 3
    )
    assert stop.is_set()


def test_store_error_ends_download() -> None:
    with pytest.raises(DataCorrupted, match="too short"):
        fill(DATA[:500], list(range(11)))


def test_stop_ends_download_early() -> None:
    assert len(fill(DATA, list(range(11)), stop_after=1).published()) <= 3
