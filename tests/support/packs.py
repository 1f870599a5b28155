"""Lays a checkpoint out as a pack, in memory: the shortest path from a Hugging Face folder to an engine in a test."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from blake3 import blake3

from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.transfer.manifest import PAGE_BYTES, Manifest, Segment, TensorEntry, chunk_bytes_for

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Pack:
    manifest: Manifest
    data: bytes

    @property
    def view(self) -> memoryview:
        return memoryview(self.data)


def build_pack(folder: Path) -> Pack:
    """The pack of a folder with one model.safetensors: groups contiguous and 64-byte aligned, segments page aligned."""
    config = json.loads((folder / "config.json").read_text())
    header, body = read_safetensors(folder / "model.safetensors")
    data = bytearray()
    tensors: list[TensorEntry] = []
    segments: list[Segment] = []
    for slots in tensors_by_segment(read_config(config)):
        begin = _pad(data, PAGE_BYTES)
        for _, group in groupby(slots, key=lambda slot: slot.group):
            _pad(data, _ALIGN_BYTES)
            for slot in group:
                entry = header[slot.name]
                assert tuple(entry["shape"]) == slot.shape
                source = body[slice(*entry["data_offsets"])]
                assert len(source) == math.prod(slot.shape) * {"F32": 4}.get(entry["dtype"], 2)
                tensors.append(TensorEntry(slot.name, slot.shape, entry["dtype"], len(data), len(source)))
                data += source
        segments.append(Segment(begin, len(data)))
    _pad(data, PAGE_BYTES)
    chunk_bytes = chunk_bytes_for(len(data))
    manifest = Manifest(
        architecture=config["architectures"][0],
        dtype=tensors[0].dtype,
        config=config,
        tensors=tuple(tensors),
        segments=tuple(segments),
        num_bytes=len(data),
        chunk_bytes=chunk_bytes,
        chunk_digests=tuple(blake3(data[i : i + chunk_bytes]).digest() for i in range(0, len(data), chunk_bytes)),
    )
    return Pack(manifest, bytes(data))


def read_safetensors(path: Path) -> tuple[dict[str, Any], memoryview]:
    """The header by tensor name, and the bytes that its offsets count in."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :]


def _pad(data: bytearray, alignment: int) -> int:
    data += bytes(-len(data) % alignment)
    return len(data)
