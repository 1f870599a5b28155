"""Streams tensors into a pack file through a buffer of one chunk; checks every weight and digests every chunk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from torchrelay.param_store.durable_files import write_all
from torchrelay.param_store.packer.core import PackPlan, PackRefused, StoredTensor, quoted
from torchrelay.param_store.packer.finite_values import first_not_finite, first_not_positive
from torchrelay.param_store.packer.packed_int8 import remove_offset
from torchrelay.transfer.manifest import chunk_bytes_for
from torchrelay.transfer.pack_layout import ITEM_BYTES

_SYNC_EVERY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a chunk that comes from one tensor, after its first ``num_skipped`` bytes."""

    begin: int
    end: int
    source: StoredTensor
    is_scale: bool
    num_skipped: int


def write_pack(
    plan: PackPlan, folder: Path, path: Path, on_progress: Callable[[int], None]
) -> tuple[int, tuple[bytes, ...]]:
    """Writes the pack to ``path``, durably. Returns the chunk size and each chunk's BLAKE3 digest.

    Raises ``PackRefused`` at the first weight that is not finite.
    """
    chunk_bytes = chunk_bytes_for(plan.layout.num_bytes)
    buffer = memoryview(bytearray(chunk_bytes))
    digests: list[bytes] = []
    num_synced = 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / name).open("rb", buffering=0)).fileno()
            for name in sorted({source.file for source in plan.sources})
        }
        out = stack.enter_context(path.open("wb", buffering=0))
        for begin, end, pieces in _chunks(plan, chunk_bytes):
            chunk = buffer[: end - begin]
            _fill(chunk, pieces, files)
            _check_numbers(chunk, pieces)
            digests.append(blake3(chunk).digest())
            write_all(out.fileno(), chunk)
            # A single sync at the end would take minutes without progress and look like a disk that hangs.
            if end - num_synced >= _SYNC_EVERY_BYTES:
                os.fdatasync(out.fileno())
                num_synced = end
            on_progress(end)
        os.fsync(out.fileno())
    return chunk_bytes, tuple(digests)


def _chunks(plan: PackPlan, chunk_bytes: int) -> Iterator[tuple[int, int, list[_Piece]]]:
    """Each chunk's range of the pack and its pieces, relative to the chunk's start."""
    tensor, entries, num_bytes = 0, plan.layout.tensors, plan.layout.num_bytes
    for begin in range(0, num_bytes, chunk_bytes):
        end = min(begin + chunk_bytes, num_bytes)
        pieces: list[_Piece] = []
        while tensor < len(entries) and entries[tensor].offset < end:
            entry, source = entries[tensor], plan.sources[tensor]
            first, last = max(entry.offset, begin), min(entry.offset + entry.num_bytes, end)
            if first < last:
                pieces.append(_Piece(first - begin, last - begin, source, tensor in plan.scales, first - entry.offset))
            if entry.offset + entry.num_bytes > end:
                break  # it continues in the next chunk
            tensor += 1
        yield begin, end, pieces


def _fill(chunk: memoryview, pieces: list[_Piece], files: dict[str, int]) -> None:
    position = 0
    for piece in pieces:
        chunk[position : piece.begin] = bytes(piece.begin - position)
        _read_all(files[piece.source.file], chunk[piece.begin : piece.end], piece)
        if piece.source.is_offset:
            remove_offset(chunk[piece.begin : piece.end])
        position = piece.end
    chunk[position:] = bytes(len(chunk) - position)


def _read_all(descriptor: int, into: memoryview, piece: _Piece) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], piece.source.offset + piece.num_skipped + done)
        if count == 0:
            raise PackRefused(piece.source.file, "the file was truncated while it was read")
        done += count


def _check_numbers(chunk: memoryview, pieces: list[_Piece]) -> None:
    for piece in pieces:
        source, data = piece.source, chunk[piece.begin : piece.end]
        if source.dtype == "I8":
            continue
        fault, needed = first_not_finite(data, source.dtype), "all weights must be finite numbers"
        if fault is None and piece.is_scale:
            fault, needed = first_not_positive(data, source.dtype), "all scales must be positive numbers"
        if fault is not None:
            index = fault[0] + piece.num_skipped // ITEM_BYTES[source.dtype]
            detail = f"tensor {quoted(source.name)}: element {index:,} is {fault[1]}; {needed}"
            raise PackRefused(source.file, detail)
