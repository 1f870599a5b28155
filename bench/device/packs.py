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

from torchrelay.engine.weights.pack_weights import TORCH_DTYPES
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.transfer.manifest import Manifest, TensorEntry
from torchrelay.transfer.pack_layout import PackLayout

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
    """A pack of random weights, with norms of ones, which keep hidden states bounded. A config may say int8."""

    def make(entry: TensorEntry) -> Tensor:
        made = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=device)
        if made.dtype == torch.int8:
            return made.random_(-127, 128)
        if entry.name.endswith("_scale"):
            return made.fill_(0.0003)
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


def kv_bytes(config: dict[str, Any], item_bytes: int = 2) -> int:
    """KV bytes of one position over all layers."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * item_bytes)


def prefill_flops(config: dict[str, Any], weight_bytes: int, num_tokens: int) -> float:
    """Flops of a prefill in bf16: two per layer weight and token, four per head element and pair of positions."""
    num_outer_weights = 2 * config["vocab_size"] * config["hidden_size"]  # embeddings and head
    num_layer_weights = weight_bytes / 2 - num_outer_weights
    pairs = num_tokens * (num_tokens + 1) / 2
    return float(2 * num_layer_weights * num_tokens + 4 * config["num_hidden_layers"] * config["hidden_size"] * pairs)
