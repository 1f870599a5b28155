"""Streams tensors into a pack file, chunk by chunk through one buffer, and digests the chunks on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from torchrelay.param_store.packer.core import PackPlan, Refused
from torchrelay.transfer.manifest import chunk_bytes_for


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a chunk that comes from one place of one file."""

    begin: int
    end: int
    file: str
    file_offset: int


def write_pack(
    plan: PackPlan, folder: Path, path: Path, on_progress: Callable[[int], None]
) -> tuple[int, tuple[bytes, ...]]:
    """Writes the pack to ``path``, durably. Returns the chunk size and each chunk's BLAKE3 digest."""
    chunk_bytes = chunk_bytes_for(plan.num_bytes)
    buffer = memoryview(bytearray(chunk_bytes))
    digests: list[bytes] = []
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / name).open("rb", buffering=0)).fileno()
            for name in sorted({source.file for source in plan.sources})
        }
        out = stack.enter_context(path.open("wb", buffering=0))
        for begin, end, pieces in _chunks(plan, chunk_bytes):
            chunk = buffer[: end - begin]
            _fill(chunk, pieces, files)
            digests.append(blake3(chunk).digest())
            _write_all(out.fileno(), chunk)
            on_progress(end)
        os.fsync(out.fileno())
    return chunk_bytes, tuple(digests)


def _chunks(plan: PackPlan, chunk_bytes: int) -> Iterator[tuple[int, int, list[_Piece]]]:
    """Each chunk's range of the pack and the pieces in it, relative to the chunk's beginning."""
    tensor = 0
    for begin in range(0, plan.num_bytes, chunk_bytes):
        end = min(begin + chunk_bytes, plan.num_bytes)
        pieces: list[_Piece] = []
        while tensor < len(plan.entries) and plan.entries[tensor].offset < end:
            entry, source = plan.entries[tensor], plan.sources[tensor]
            first, last = max(entry.offset, begin), min(entry.offset + entry.num_bytes, end)
            if first < last:
                skipped = first - entry.offset
                pieces.append(_Piece(first - begin, last - begin, source.file, source.offset + skipped))
            if entry.offset + entry.num_bytes > end:
                break  # it goes on in the next chunk
            tensor += 1
        yield begin, end, pieces


def _fill(chunk: memoryview, pieces: list[_Piece], files: dict[str, int]) -> None:
    position = 0
    for piece in pieces:
        chunk[position : piece.begin] = bytes(piece.begin - position)
        _read_all(files[piece.file], chunk[piece.begin : piece.end], piece)
        position = piece.end
    chunk[position:] = bytes(len(chunk) - position)


def _read_all(descriptor: int, into: memoryview, piece: _Piece) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], piece.file_offset + done)
        if count == 0:
            raise Refused(piece.file, "it became shorter while it was read")
        done += count


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
