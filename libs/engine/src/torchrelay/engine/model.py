"""The decoder that every supported architecture is, driven by its config.

Arithmetic follows transformers: norms and softmax in fp32, everything else in the model's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine.attention import AttentionBackend
from torchrelay.engine.batch import Batch
from torchrelay.engine.linear import linear
from torchrelay.engine.rope import rotate
from torchrelay.engine.weights import LayerWeights, Weights
from torchrelay.transfer.layout import ModelConfig


class Decoder:
    """Embedding, layers and head, each usable by itself once its segment of the pack is there."""

    def __init__(self, config: ModelConfig, weights: Weights, kv: Tensor, backend: AttentionBackend) -> None:
        self._config = config
        self._weights = weights
        self._kv = kv  # [layers, 2, slots, kv_heads, head_dim]
        self._backend = backend

    def embed(self, token_ids: Tensor) -> Tensor:
        """[rows] -> [rows, hidden]."""
        return F.embedding(token_ids, self._weights.embedding())

    def run_layer(self, layer: int, hidden: Tensor, batch: Batch) -> Tensor:
        """[rows, hidden] -> the same after one layer; writes the batch's KV. Waits for the layer's weights."""
        weights, kv = self._weights.layer(layer), self._kv[layer]
        hidden = hidden + self._attention(
            weights, kv, rms_norm(hidden, weights.input_norm, self._config.norm_eps), batch
        )
        inner = linear(rms_norm(hidden, weights.post_norm, self._config.norm_eps), weights.gate_up)
        gate, up = inner.chunk(2, dim=-1)
        return hidden + linear(F.silu(gate) * up, weights.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] after the last layer -> [rows, vocab], in the model's dtype."""
        normed = rms_norm(hidden, self._weights.final_norm(), self._config.norm_eps)
        return linear(normed, self._weights.head())

    def _attention(self, weights: LayerWeights, kv: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = linear(hidden, weights.qkv, weights.qkv_bias).view(len(hidden), -1, self._config.head_dim)
        queries_keys, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if weights.qk_norm is not None:
            queries_keys = rms_norm(queries_keys, weights.qk_norm, self._config.norm_eps)
        queries_keys = rotate(queries_keys, batch.cos, batch.sin)
        queries, keys = queries_keys[:, :num_heads], queries_keys[:, num_heads:]
        kv[0].index_copy_(0, batch.write_slots, keys)
        kv[1].index_copy_(0, batch.write_slots, values)
        return linear(self._backend.attend(queries, kv, batch.attention), weights.o)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in fp32; rounded to the input's dtype before the weight."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
