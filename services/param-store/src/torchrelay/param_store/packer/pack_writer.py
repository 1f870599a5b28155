"""Streams tensors into a pack file through a buffer of one chunk; checks every weight and digests every chunk.

Weights that have another dtype than the pack are converted on the way, and those that get int8 numbers are quantized.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from torchrelay.param_store.durable_files import write_all
from torchrelay.param_store.packer.core import PackPlan, PackRefused, StoredTensor, quoted
from torchrelay.param_store.packer.dtype_conversion import convert, widened
from torchrelay.param_store.packer.finite_values import FLOATS, first_not_finite, first_not_positive, first_not_zero
from torchrelay.param_store.packer.int8_weights import BLOCK_VALUES, int8_of
from torchrelay.param_store.packer.packed_int8 import remove_offset
from torchrelay.transfer.manifest import chunk_bytes_for
from torchrelay.transfer.pack_layout import ITEM_BYTES

_SYNC_EVERY_BYTES = 1 << 30
_CONVERTED_VALUES = 1 << 18  # at a time
Scales = dict[str, npt.NDArray[np.float32]]  # by the name of a weight, from its first piece until they are in the pack


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a chunk that comes from one tensor, after its first ``num_skipped`` values."""

    begin: int
    end: int
    source: StoredTensor
    dtype: str  # in the pack
    is_scale: bool
    num_skipped: int
    required: bytes | None = None  # the bytes of the whole tensor


def write_pack(
    plan: PackPlan, folder: Path, path: Path, on_progress: Callable[[int], None]
) -> tuple[int, tuple[bytes, ...]]:
    """Writes the pack to ``path``, durably. Returns the chunk size and each chunk's BLAKE3 digest.

    Raises ``PackRefused`` at the first weight that is not finite, or a bias that is left out and not zero.
    """
    chunk_bytes = chunk_bytes_for(plan.layout.num_bytes)
    buffer = memoryview(bytearray(chunk_bytes))
    digests: list[bytes] = []
    scales: Scales = {}
    num_synced = 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / name).open("rb", buffering=0)).fileno()
            for name in sorted({source.file for source in (*plan.sources, *plan.zeros)})
        }
        for source in plan.zeros:
            _check_zero(files[source.file], source)
        out = stack.enter_context(path.open("wb", buffering=0))
        for begin, end, pieces in _chunks(plan, chunk_bytes):
            chunk = buffer[: end - begin]
            _fill(chunk, pieces, files, scales)
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
                num_skipped = (first - entry.offset) // ITEM_BYTES[entry.dtype]
                is_scale, required = tensor in plan.scales, plan.required.get(tensor)
                pieces.append(_Piece(first - begin, last - begin, source, entry.dtype, is_scale, num_skipped, required))
            if entry.offset + entry.num_bytes > end:
                break  # it continues in the next chunk
            tensor += 1
        yield begin, end, pieces


def _fill(chunk: memoryview, pieces: list[_Piece], files: dict[str, int], scales: Scales) -> None:
    """Fills a chunk. Raises ``PackRefused`` for a weight that is not finite, or a scale that is not positive."""
    position = 0
    for piece in pieces:
        chunk[position : piece.begin] = bytes(piece.begin - position)
        into, descriptor = chunk[piece.begin : piece.end], files[piece.source.file]
        if piece.source.weight is not None:
            _quantize(descriptor, into, piece, piece.source.weight, scales)
        elif piece.source.dtype == piece.dtype:
            _read(descriptor, into, piece, piece.num_skipped)
        else:
            _convert(descriptor, into, piece)
        position = piece.end
    chunk[position:] = bytes(len(chunk) - position)


def _convert(descriptor: int, into: memoryview, piece: _Piece) -> None:
    source_dtype, num_bytes = piece.source.dtype, ITEM_BYTES[piece.dtype]
    for begin in range(0, len(into) // num_bytes, _CONVERTED_VALUES):
        part = into[begin * num_bytes : (begin + _CONVERTED_VALUES) * num_bytes]
        values = memoryview(bytearray(len(part) // num_bytes * ITEM_BYTES[source_dtype]))
        _read(descriptor, values, piece, piece.num_skipped + begin)
        convert(values, source_dtype, part, piece.dtype)
        _check_numbers(part, piece.dtype, piece, piece.num_skipped + begin, f" in {piece.dtype}")


def _quantize(descriptor: int, into: memoryview, piece: _Piece, weight: StoredTensor, scales: Scales) -> None:
    """Fills in int8 numbers of a weight, from blocks of whole rows, whose scales it keeps; or fills in the scales."""
    num_rows, row_values = weight.shape
    of_weight = scales.setdefault(weight.name, np.empty(num_rows, np.float32))
    values = np.frombuffer(into, np.float32 if piece.is_scale else np.int8)
    begin, end = piece.num_skipped, piece.num_skipped + len(values)
    if piece.is_scale:
        values[:] = of_weight[begin:end]
        if end == num_rows:
            del scales[weight.name]
        return
    num_block_rows = max(BLOCK_VALUES // row_values, 1)
    last_row = -(-end // row_values)  # which may end in the next chunk, as the first may begin in the chunk before
    for row in range(begin // row_values, last_row, num_block_rows):
        rows = slice(row, min(row + num_block_rows, last_row))
        block = memoryview(bytearray((rows.stop - row) * row_values * ITEM_BYTES[weight.dtype]))
        _read(descriptor, block, replace(piece, source=weight), row * row_values)
        numbers, of_weight[rows] = int8_of(widened(block, weight.dtype).reshape(-1, row_values))
        first, last = max(row * row_values, begin), min(rows.stop * row_values, end)
        values[first - begin : last - begin] = numbers.reshape(-1)[first - row * row_values : last - row * row_values]


def _read(descriptor: int, into: memoryview, piece: _Piece, num_skipped: int) -> None:
    """Reads the values of a tensor after the first ``num_skipped``, and checks them."""
    source = piece.source
    _read_bytes(descriptor, into, source, source.offset + num_skipped * ITEM_BYTES[source.dtype])
    if source.dtype in FLOATS:
        _check_numbers(into, source.dtype, piece, num_skipped)
    elif source.is_offset:
        remove_offset(into)
    if piece.required is not None:
        skipped = num_skipped * ITEM_BYTES[source.dtype]
        if into != piece.required[skipped : skipped + len(into)]:
            raise PackRefused(source.file, f"tensor {quoted(source.name)}: its numbers contradict config.json")


def _read_bytes(descriptor: int, into: memoryview, source: StoredTensor, begin: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], begin + done)
        if count == 0:
            raise PackRefused(source.file, "the file was truncated while it was read")
        done += count


def _check_zero(descriptor: int, source: StoredTensor) -> None:
    values = memoryview(bytearray(source.num_bytes))
    _read_bytes(descriptor, values, source, source.offset)
    if (index := first_not_zero(values, source.dtype)) is not None:
        detail = f"element {index:,} is not zero, and config.json has no biases"
        raise PackRefused(source.file, f"tensor {quoted(source.name)}: {detail}")


def _check_numbers(values: memoryview, dtype: str, piece: _Piece, num_skipped: int, where: str = "") -> None:
    """Raises ``PackRefused`` for a weight that is not finite, or a scale that is not positive."""
    fault, needed = first_not_finite(values, dtype), "all weights must be finite numbers"
    if fault is None and piece.is_scale:
        fault, needed = first_not_positive(values, dtype), "all scales must be positive numbers"
    if fault is not None:
        index = f"element {num_skipped + fault[0]:,} is {fault[1]}{where}"
        raise PackRefused(piece.source.file, f"tensor {quoted(piece.source.name)}: {index}; {needed}")
