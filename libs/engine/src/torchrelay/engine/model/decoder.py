"""The decoder of all supported architectures, driven by its config.

Arithmetic follows transformers: norms and softmax in fp32, everything else in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine.kernels.attention import AttentionBackend, Scoring
from torchrelay.engine.kernels.cpu.layers import CpuLayers
from torchrelay.engine.kernels.fused_ops import FusedOps
from torchrelay.engine.kernels.layer import LayerView, LayerWeights
from torchrelay.engine.kernels.linear import linear
from torchrelay.engine.model.batch import Batch
from torchrelay.engine.model.mlp import Adapt, feed_forward
from torchrelay.engine.model.rope import rotate
from torchrelay.engine.weights.pack_weights import PackWeights
from torchrelay.modelspec.config import ModelConfig


@dataclass(eq=False)
class Decoder:
    """Embedding, layers and head, each usable once its segment of the pack has arrived."""

    _config: ModelConfig
    _weights: PackWeights
    _kv: Tensor  # [layers, 2, slots, kv_heads, head_dim]
    _backend: AttentionBackend
    _kind_of_layer: Sequence[int]
    fused_ops: FusedOps | None
    _whole_layers: CpuLayers | None

    def __post_init__(self) -> None:
        self._norm_kind = self._config.norm_eps, self._config.architecture.unit_offset_norms
        self._scoring = Scoring(self._config.query_scale, self._config.score_cap)

    def embed(self, batch: Batch) -> Tensor:
        """[rows, hidden]."""
        hidden = F.embedding(batch.token_ids, self._weights.embedding())
        if not self._config.architecture.scaled_embeddings:
            return _times(hidden, self._config.multipliers.embedding)
        # Rounded to the dtype as in transformers, but a plain number: a recorded step cannot create the tensor.
        return hidden * torch.tensor(self._config.hidden_size**0.5, dtype=hidden.dtype).item()

    def run_layers(self, begin: int, end: int, hidden: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """Runs as many of the layers [begin, end) as one call computes, at least one; also returns the next layer.

        [rows, hidden] -> the same; writes the batch's KV.
        """
        adapters = None if batch.adapted is None else batch.adapted.address
        if self._whole_layers is not None and (batch.adapted is None or adapters is not None):
            weights = self._weights.layers(begin, end)
            hidden, num_done = self._whole_layers.run(
                begin, weights, self._kv, hidden, batch.write_slots, batch.views, adapters
            )
            if num_done:
                return hidden, begin + num_done
        return self.run_layer(begin, hidden, batch), begin + 1

    def run_layer(self, layer: int, hidden: Tensor, batch: Batch) -> Tensor:
        """Runs one layer, [rows, hidden] -> the same; writes the batch's KV."""
        weights, view = self._weights.layer(layer), batch.views[self._kind_of_layer[layer]]

        def adapt(group: str, x: Tensor, out: Tensor) -> None:
            if batch.adapted is not None:
                batch.adapted.add_to(out, layer, group, x)

        normed = hidden if weights.input_norm is None else self._norm(hidden, weights.input_norm)
        attended = self._attention(weights, self._kv[layer], normed, batch.write_slots, view, adapt)
        if weights.attention_out_norm is not None:
            attended = self._norm(attended, weights.attention_out_norm)
        residual = self._config.multipliers.residual
        hidden, inner = self._add_norm(hidden, _times(attended, residual), weights.post_norm)
        fed_forward = feed_forward(inner, weights, self._config.activation, self._config.experts, self.fused_ops, adapt)
        if weights.mlp_out_norm is not None:
            fed_forward = self._norm(fed_forward, weights.mlp_out_norm)
        return hidden + _times(fed_forward, residual)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] after the last layer -> the same."""
        return self._norm(hidden, self._weights.final_norm())

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] after the last layer -> [rows, vocab], in the model's dtype."""
        logits = linear(self.final_norm(hidden), self._weights.head())
        if self._config.multipliers.logits != 1.0:
            logits = logits / self._config.multipliers.logits
        cap = self._config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _attention(
        self, weights: LayerWeights, kv: Tensor, hidden: Tensor, write_slots: Tensor, view: LayerView, adapt: Adapt
    ) -> Tensor:
        projected = linear(hidden, weights.qkv, weights.qkv_bias)
        adapt("qkv", hidden, projected)
        queries = self._place_heads(weights, kv, projected, write_slots, view)
        attended = self._backend.attend(queries, kv, view.attention, self._scoring)
        out = linear(attended, weights.o, weights.o_bias)
        adapt("o", attended, out)
        return out

    def _place_heads(
        self, weights: LayerWeights, kv: Tensor, projected: Tensor, write_slots: Tensor, view: LayerView
    ) -> Tensor:
        """Writes keys and values to their slots; returns the queries."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        if weights.wide_qk_norm is not None:
            projected = self._wide_qk_norm(projected, *weights.wide_qk_norm)
        heads = projected.view(len(projected), -1, self._config.head_dim)
        if self.fused_ops is not None:
            return self.fused_ops.place_heads(
                heads, weights.qk_norm, self._norm_kind, (view.cos, view.sin), kv, write_slots
            )
        queries_keys, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if weights.qk_norm is not None:
            queries_keys = self._norm(queries_keys, weights.qk_norm)
        queries_keys = rotate(queries_keys, view.cos, view.sin)
        queries, keys = queries_keys[:, :num_heads], queries_keys[:, num_heads:]
        kv[0].index_copy_(0, write_slots, keys)
        kv[1].index_copy_(0, write_slots, values)
        return queries

    def _wide_qk_norm(self, projected: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
        """[rows, queries + keys + values] with the queries of a row normalised together, and so its keys."""
        num_queries, num_normed = len(of_queries), len(of_queries) + len(of_keys)
        queries = self._norm(projected[:, :num_queries].contiguous(), of_queries)
        keys = self._norm(projected[:, num_queries:num_normed].contiguous(), of_keys)
        return torch.cat([queries, keys, projected[:, num_normed:]], dim=1)

    def _add_norm(self, x: Tensor, added: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum and its norm; without a weight the sum alone, twice."""
        if weight is None:
            x = x + added
            return x, x
        if self.fused_ops is not None:
            return self.fused_ops.add_norm(x, added, weight, *self._norm_kind)
        x = x + added
        return x, self._norm(x, weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = rms_norm if self.fused_ops is None else self.fused_ops.rms_norm
        return norm(x, weight, *self._norm_kind)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Root-mean-square norm over the last axis, in fp32, rounded to the input's dtype before the weight is applied.

    With ``unit_offset`` 1 is added to the weight, which is applied before rounding.
    """
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)
