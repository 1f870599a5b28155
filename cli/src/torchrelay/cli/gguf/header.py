"""The header of a GGUF file: its metadata, and where each tensor lies.

The format, little endian: magic, version, number of tensors, number of metadata values; the values (name, type, value);
the tensors (name, dimensions, type, offset); then their bytes, from the next multiple of the alignment on
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Every count and length is compared with the bytes that are
left before anything of that size is created.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchrelay.cli.errors import CliError
from torchrelay.cli.gguf.refusal import quoted, refusal

MAX_HEADER_BYTES: Final = 64 << 20  # vocabularies of 256k tokens with their merges take 12 MB
MAX_ARRAY: Final = 1 << 21  # elements; the largest known vocabulary has 262k tokens, and 515k merges
MAX_NAME_BYTES: Final = 256
MAX_RANK: Final = 4
_MAGIC, _LFS_POINTER = b"GGUF", b"version https://git-lfs"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH_BYTES = 8
_MIN_VALUE_BYTES, _MIN_TENSOR_BYTES = 13, 24  # an empty name and the smallest rest
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
# By ggml's numbers: elements and bytes of a block. What is not here is refused.
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor; ``shape`` has the contiguous axis last, ``offset`` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata by key, and the tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path, num_bytes: int | None = None) -> GgufHeader:
    """Reads and checks the header; reads no weights. ``num_bytes``: the size that the file will have, if ``path`` has
    only its first ``MAX_HEADER_BYTES`` or more so far. Raises ``CliError`` with the file and the field.
    """
    size = path.stat().st_size if num_bytes is None else num_bytes
    if not size:
        raise refusal(path, "magic", "the file is empty", "download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return _Reader(path, mapped, size).header()


class _Reader:
    """A position in the header."""

    def __init__(self, path: Path, mapped: mmap.mmap, size: int) -> None:
        self._path, self._mapped, self._size = path, mapped, size
        self._end = min(size, MAX_HEADER_BYTES)
        self._position = 0
        self._field = "magic"  # what is being read, for refusals

    def header(self) -> GgufHeader:
        self._check_magic()
        num_tensors, num_values = self._number("Q", "tensor_count"), self._number("Q", "metadata_kv_count")
        self._check_left("metadata_kv_count", num_values, _MIN_VALUE_BYTES)
        self._check_left("tensor_count", num_tensors, _MIN_TENSOR_BYTES)
        metadata: dict[str, Any] = {}
        for number in range(num_values):
            key = self._name(f"metadata {number}")
            if key in metadata:
                raise self._refusal("the key appears twice", key)
            metadata[key] = self._value(key, self._number("I", key))
        entries = [self._tensor_entry(number) for number in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment not in {1 << bits for bits in range(_MAX_ALIGNMENT.bit_length())}:
            raise self._refusal(f"{quoted(alignment)} is not a power of two", "general.alignment")
        data = -(-self._position // alignment) * alignment
        return GgufHeader(self._path, metadata, self._tensors(entries, data, alignment))

    def _check_magic(self) -> None:
        begin = self._mapped[: len(_LFS_POINTER)]
        if begin == _LFS_POINTER:
            raise self._refusal("the file is a Git-LFS pointer, not the model", hint="fetch the model: git lfs pull")
        if begin[:4] != _MAGIC:
            raise self._refusal(f"the file begins with {quoted(begin[:4])}, not with {_MAGIC!r}")
        self._position = len(_MAGIC)
        version = self._number("I", "version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise self._refusal("the file is big-endian; files in little-endian order alone are read")
        if version not in _VERSIONS:
            raise self._refusal(f"{version} is not supported; supported are {', '.join(map(str, _VERSIONS))}")

    def _tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], data: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors, which must lie in the file and not overlap."""
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in entries:
            if name in tensors:
                raise self._refusal("the tensor appears twice", name)
            if number not in TENSOR_TYPES:
                known = ", ".join(known for known, _, _ in TENSOR_TYPES.values())
                raise self._refusal(f"tensor type {_type_name(number)} is not supported; supported are {known}", name)
            type_name, block, block_bytes = TENSOR_TYPES[number]
            if shape[-1] % block:
                raise self._refusal(f"rows of {shape[-1]:,} values are not whole {type_name} blocks of {block}", name)
            num_bytes, left = math.prod(shape) // block * block_bytes, self._size - data
            if offset % alignment:
                raise self._refusal(f"offset {offset:,} is not a multiple of the alignment {alignment}", name)
            if offset + num_bytes > left:
                fault = f"offset {offset:,} and {num_bytes:,} bytes reach beyond the file, which has {max(left, 0):,}"
                raise self._refusal(fault, name, "download the file again")
            tensors[name] = GgufTensor(name, shape, type_name, data + offset, num_bytes)
        end = data
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._refusal("its bytes overlap another tensor's", tensor.name)
            end = tensor.offset + tensor.num_bytes
        return tensors

    def _tensor_entry(self, number: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset."""
        name = self._name(f"tensor {number}")
        rank = self._number("I", name)
        if not 1 <= rank <= MAX_RANK:
            raise self._refusal(f"it has {rank:,} dimensions; supported are 1 to {MAX_RANK}")
        shape = tuple(reversed([self._number("Q", name) for _ in range(rank)]))
        if not all(shape):
            raise self._refusal(f"a dimension of {quoted(shape)} is 0")
        return name, shape, self._number("I", name), self._number("Q", name)

    def _value(self, key: str, number: int) -> Any:
        if number == _STRING:
            return self._text(key)
        if number in _SCALARS:
            return self._number(_SCALARS[number], key)
        if number != _ARRAY:
            raise self._refusal(f"value type {number:,} is unknown")
        kind, count = self._number("I", key), self._number("Q", key)
        if kind != _STRING and kind not in _SCALARS:
            raise self._refusal(f"an array of value type {kind:,} is not supported")
        if count > MAX_ARRAY:
            raise self._refusal(f"an array of {count:,} elements; at most {MAX_ARRAY:,} are read")
        self._check_left(key, count, _LENGTH_BYTES if kind == _STRING else struct.calcsize(_SCALARS[kind]))
        if kind == _STRING:
            return [self._text(key) for _ in range(count)]
        return list(self._numbers(_SCALARS[kind], count))

    def _name(self, place: str) -> str:
        name = self._text(place, MAX_NAME_BYTES)
        if not name.isprintable() or not name:
            raise self._refusal(f"the name {quoted(name)} is not printable text")
        return name

    def _text(self, field: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self._number("Q", field)
        if length > limit:
            raise self._refusal(f"a text of {length:,} bytes; at most {limit:,} are read")
        self._check_left(field, length, 1)
        begin, self._position = self._position, self._position + length
        try:
            return self._mapped[begin : self._position].decode()
        except UnicodeDecodeError:
            raise self._refusal("a text is not UTF-8") from None

    def _number(self, code: str, field: str) -> Any:
        self._field = field
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        self._check_left(self._field, struct.calcsize(form), 1)
        values = struct.unpack_from(form, self._mapped, self._position)
        self._position += struct.calcsize(form)
        return values

    def _check_left(self, field: str, count: int, num_bytes: int) -> None:
        self._field = field
        left = self._end - self._position
        if count * num_bytes > left:
            whose = "the file has" if self._end == self._size else f"a header of {MAX_HEADER_BYTES:,} has"
            raise self._refusal(f"it needs {count * num_bytes:,} bytes or more, and {whose} {left:,} left for it")

    def _refusal(self, fault: str, field: str = "", hint: str = "nothing was sent") -> CliError:
        return refusal(self._path, field or self._field, fault, hint)


def _type_name(number: int) -> str:
    """The name of a type that ggml has, or its number."""
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(number).name if number in set(GGMLQuantizationType) else f"{number:,}"
