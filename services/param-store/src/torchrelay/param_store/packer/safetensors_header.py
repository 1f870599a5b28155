"""The header of a safetensors file, read as untrusted input.

The format: 8 bytes of header length (little endian), a JSON object {name: {dtype, shape, data_offsets}}, then the
bytes of the tensors, which must fill the rest of the file without holes, overlaps or surplus bytes
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torchrelay.param_store.packer.core import PackRefused, StoredTensor, quoted
from torchrelay.param_store.packer.documents import parse_object

# The format allows 100 MB. The largest known model needs 200 KB, and parsing takes ten times the header's size.
MAX_HEADER_BYTES = 8 << 20
_MAX_RANK = 8
_DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


def read_tensors(folder: Path, file: str) -> list[StoredTensor]:
    """The tensors of a file, by offset. Raises ``PackRefused`` for any inconsistency."""
    header, body = _read_header(folder, file)
    num_body_bytes = (folder / file).stat().st_size - body
    metadata = header.pop("__metadata__", {}) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise PackRefused(file, "__metadata__ is not an object of strings")
    tensors = sorted((_tensor(file, body, *item) for item in header.items()), key=lambda t: (t.offset, t.num_bytes))
    position = body
    for tensor in tensors:
        if tensor.offset != position:
            fault = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise PackRefused(file, f"tensor {quoted(tensor.name)}: data_offsets {fault}")
        position += tensor.num_bytes
    if position != body + num_body_bytes:
        raise PackRefused(
            file, f"the tensors take {position - body:,} bytes and the file has {num_body_bytes:,} for them"
        )
    return tensors


def _read_header(folder: Path, file: str) -> tuple[dict[str, Any], int]:
    size = (folder / file).stat().st_size
    with (folder / file).open("rb") as stored:
        prefix = stored.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8:
            raise PackRefused(file, f"it has {size} bytes and cannot hold a safetensors header")
        if length > MAX_HEADER_BYTES:
            raise PackRefused(file, f"its header claims {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
        if length > size - 8:
            raise PackRefused(
                file, f"its header claims {length:,} bytes and the file has {size - 8:,} after the length"
            )
        encoded = stored.read(length)
    if not encoded.startswith(b"{"):
        raise PackRefused(file, "its header does not begin with '{'")
    return parse_object(file, encoded), 8 + length


def _tensor(file: str, body: int, name: str, entry: Any) -> StoredTensor:
    """An entry of the header, whose byte range must match its shape and dtype."""

    def refuse(detail: str) -> PackRefused:
        return PackRefused(file, f"tensor {quoted(name)}: {detail}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("its entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise refuse(f"dtype {quoted(dtype)} is unknown")
    if not _are_non_negative_integers(shape) or len(shape) > _MAX_RANK:
        raise refuse(f"shape {quoted(shape)} is not a list of at most {_MAX_RANK} non-negative integers")
    if not _are_non_negative_integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"data_offsets {quoted(offsets)} are not a range")
    begin, end = offsets
    needed = math.prod(shape) * _DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise refuse(f"shape {quoted(shape)} of {dtype} needs {needed:,} bytes and data_offsets give {end - begin:,}")
    return StoredTensor(name, dtype, tuple(shape), file, body + begin, end - begin)


def _are_non_negative_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**63 for number in value)
