"""Lays a checkpoint out as a pack, in memory: the shortest path from a Hugging Face folder to an engine in a test."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.transfer.manifest import Manifest, chunk_bytes_for
from torchrelay.transfer.pack_layout import PackLayout


@dataclass(frozen=True)
class Pack:
    manifest: Manifest
    data: bytes

    @property
    def view(self) -> memoryview:
        return memoryview(self.data)


def build_pack(folder: Path) -> Pack:
    """The pack of a folder with one model.safetensors."""
    config = json.loads((folder / "config.json").read_text())
    header, body = read_safetensors(folder / "model.safetensors")
    if "embed_tokens.weight" in header:  # saved without a head
        header = {f"model.{name}": entry for name, entry in header.items()}
    segments = [
        [replace(slot, dtype=header[slot.name]["dtype"]) for slot in slots]
        for slots in tensors_by_segment(read_config(config))
    ]
    layout = PackLayout.of(segments, segments[0][0].dtype)
    data = bytearray(layout.num_bytes)
    for tensor in layout.tensors:
        stored = header[tensor.name]
        assert (tuple(stored["shape"]), stored["dtype"]) == (tensor.shape, tensor.dtype)
        data[tensor.offset : tensor.offset + tensor.num_bytes] = body[slice(*stored["data_offsets"])]
    chunk_bytes = chunk_bytes_for(len(data))
    digests = tuple(blake3(data[i : i + chunk_bytes]).digest() for i in range(0, len(data), chunk_bytes))
    return Pack(layout.manifest(config, chunk_bytes, digests), bytes(data))


def read_safetensors(path: Path) -> tuple[dict[str, Any], memoryview]:
    """The header by tensor name, and the bytes that its offsets count in."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return header, memoryview(content)[8 + size :]
