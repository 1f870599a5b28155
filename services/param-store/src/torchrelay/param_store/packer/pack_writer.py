"""Streams tensors into a pack file through a buffer of one chunk; checks every weight and digests every chunk.

Weights that have another dtype than the pack are converted on the way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from torchrelay.modelspec.tensor_order import DTYPE_BYTES
from torchrelay.param_store.durable_files import write_all
from torchrelay.param_store.packer.core import PackPlan, PackRefused, StoredTensor, quoted
from torchrelay.param_store.packer.dtype_conversion import convert
from torchrelay.param_store.packer.finite_values import first_not_finite
from torchrelay.transfer.manifest import chunk_bytes_for

_SYNC_EVERY_BYTES = 1 << 30
_CONVERTED_VALUES = 1 << 18  # at a time


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a chunk that comes from one tensor, after its first ``num_skipped`` values."""

    begin: int
    end: int
    source: StoredTensor
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
            _fill(chunk, pieces, files, plan.layout.dtype)
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
                num_skipped = (first - entry.offset) // DTYPE_BYTES[plan.layout.dtype]
                pieces.append(_Piece(first - begin, last - begin, source, num_skipped))
            if entry.offset + entry.num_bytes > end:
                break  # it continues in the next chunk
            tensor += 1
        yield begin, end, pieces


def _fill(chunk: memoryview, pieces: list[_Piece], files: dict[str, int], dtype: str) -> None:
    """Fills a chunk whose weights are of ``dtype``. Raises ``PackRefused`` for a weight that is not finite."""
    position = 0
    for piece in pieces:
        chunk[position : piece.begin] = bytes(piece.begin - position)
        into, descriptor = chunk[piece.begin : piece.end], files[piece.source.file]
        if piece.source.dtype == dtype:
            _read(descriptor, into, piece.source, piece.num_skipped)
        else:
            _convert(descriptor, into, piece, dtype)
        position = piece.end
    chunk[position:] = bytes(len(chunk) - position)


def _convert(descriptor: int, into: memoryview, piece: _Piece, dtype: str) -> None:
    source, num_bytes = piece.source, DTYPE_BYTES[dtype]
    for begin in range(0, len(into) // num_bytes, _CONVERTED_VALUES):
        part = into[begin * num_bytes : (begin + _CONVERTED_VALUES) * num_bytes]
        values = memoryview(bytearray(len(part) // num_bytes * DTYPE_BYTES[source.dtype]))
        _read(descriptor, values, source, piece.num_skipped + begin)
        convert(values, source.dtype, part, dtype)
        _check_finite(part, dtype, source, piece.num_skipped + begin, f" in {dtype}")


def _read(descriptor: int, into: memoryview, source: StoredTensor, num_skipped: int) -> None:
    """Reads the values of a tensor after the first ``num_skipped``. Raises ``PackRefused`` if one is not finite."""
    done, begin = 0, source.offset + num_skipped * DTYPE_BYTES[source.dtype]
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], begin + done)
        if count == 0:
            raise PackRefused(source.file, "the file was truncated while it was read")
        done += count
    _check_finite(into, source.dtype, source, num_skipped)


def _check_finite(values: memoryview, dtype: str, source: StoredTensor, num_skipped: int, where: str = "") -> None:
    if fault := first_not_finite(values, dtype):
        index = f"element {num_skipped + fault[0]:,} is {fault[1]}{where}"
        detail = f"tensor {quoted(source.name)}: {index}; all weights must be finite numbers"
        raise PackRefused(source.file, detail)
