"""Packs in memory for the GPU bench, from a checkpoint or with random weights."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.transfer.manifest import Manifest, TensorEntry
from torchrelay.transfer.pack_layout import PackLayout

_TORCH_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16}
LLAMA_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Pack:
    """A pack whose ``memory`` is mapped but not pinned, as in an arena."""

    manifest: Manifest
    memory: mmap.mmap

    @property
    def data(self) -> memoryview:
        return memoryview(self.memory)

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments without padding."""
        return sum(span.end - span.begin for span in self.manifest.segments)

    def segment_bytes(self, segment: int) -> int:
        span = self.manifest.segments[segment]
        return span.end - span.begin


def pack_of_checkpoint(folder: Path) -> Pack:
    """The pack of a folder with config.json and model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    dtype = "F32" if next(iter(tensors.values())).dtype == torch.float32 else "BF16"
    config = json.loads((folder / "config.json").read_text())
    return _pack(config, dtype, lambda entry: tensors[entry.name])


def random_pack(config: dict[str, Any], dtype: str, device: torch.device) -> Pack:
    """A pack of random weights, with norms of ones, which keep hidden states bounded."""

    def make(entry: TensorEntry) -> Tensor:
        made = torch.empty(entry.shape, dtype=_TORCH_DTYPES[dtype], device=device)
        return made.fill_(1.0) if "norm" in entry.name else made.normal_(0.0, 0.02)

    return _pack(config, dtype, make)


def _pack(config: dict[str, Any], dtype: str, tensor_of: Callable[[TensorEntry], Tensor]) -> Pack:
    layout = PackLayout.of(tensors_by_segment(read_config(config)), dtype)
    manifest = layout.local_manifest(config)
    memory = mmap.mmap(-1, manifest.num_bytes)
    arena = torch.frombuffer(memory, dtype=torch.uint8)
    for entry in manifest.tensors:
        made = tensor_of(entry).contiguous().reshape(-1).view(torch.uint8)
        arena[entry.offset : entry.offset + entry.num_bytes].copy_(made)
    return Pack(manifest, memory)
