"""The offset of each tensor in a pack."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol

from torchrelay.transfer.manifest import FORMAT_VERSION, OPAQUE_FORMAT, PAGE_BYTES, Manifest, Segment, TensorEntry

GROUP_ALIGN_BYTES: Final = 64
ITEM_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}


class PackTensor(Protocol):
    """A tensor that the architecture needs. The tensors of one ``group`` are contiguous."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def group(self) -> str: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Tensors and segments by offset; ``num_bytes`` includes the padding at the end."""

    dtype: str
    tensors: tuple[TensorEntry, ...]
    segments: tuple[Segment, ...]
    num_bytes: int

    @classmethod
    def of(cls, segments: Iterable[Iterable[PackTensor]], dtype: str) -> PackLayout:
        """Lays out tensors, in ``dtype`` unless they have their own: segments and the pack's end aligned to pages,
        groups to 64 bytes.
        """
        entries, spans, position = list[TensorEntry](), list[Segment](), 0
        for tensors in segments:
            position = begin = _aligned(position, PAGE_BYTES)
            for _, group in groupby(tensors, key=lambda tensor: tensor.group):
                position = _aligned(position, GROUP_ALIGN_BYTES)
                for tensor in group:
                    own = tensor.dtype or dtype
                    num_bytes = math.prod(tensor.shape, start=ITEM_BYTES[own])
                    entries.append(TensorEntry(tensor.name, tensor.shape, own, position, num_bytes))
                    position += num_bytes
            spans.append(Segment(begin, position))
        return cls(dtype, tuple(entries), tuple(spans), _aligned(position, PAGE_BYTES))

    def local_manifest(self, config: dict[str, Any]) -> Manifest:
        """The manifest of a pack that stays in this process: one chunk, without a digest that could be verified."""
        return self.manifest(config, self.num_bytes, (bytes(32),))

    def manifest(
        self,
        config: dict[str, Any],
        chunk_bytes: int,
        chunk_digests: tuple[bytes, ...],
        *,
        is_opaque: bool = False,
    ) -> Manifest:
        return Manifest(
            format_version=OPAQUE_FORMAT if is_opaque else FORMAT_VERSION,
            architecture=config["architectures"][0],
            dtype=self.dtype,
            config=config,
            tensors=self.tensors,
            segments=self.segments,
            num_bytes=self.num_bytes,
            chunk_bytes=chunk_bytes,
            chunk_digests=chunk_digests,
        )


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
