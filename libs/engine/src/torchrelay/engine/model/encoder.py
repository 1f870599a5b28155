"""The encoder: BERT's layers, in which every position attends to all positions of its prompt.

A prompt is computed in one piece, so nothing of it is kept: its pages only bound how many prompts run at once.
BERT normalizes after each addition. Here a layer begins with the norm of the sum before it, so that the last norm is
the final norm, as in a decoder; the arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine.kernels.linear import linear
from torchrelay.engine.model.batch import Batch
from torchrelay.engine.weights.pack_weights import PackWeights
from torchrelay.modelspec.config import EncoderConfig, ModelConfig


@dataclass(eq=False)
class Encoder:
    """Embedding, layers and last norm, each usable once its segment of the pack has arrived."""

    _config: ModelConfig
    _encoder: EncoderConfig
    _weights: PackWeights

    def embed(self, batch: Batch) -> Tensor:
        """[rows, hidden], before the first norm."""
        weights = self._weights.segment(0)
        positions = torch.cat(
            [self._positions(prompt) for prompt in torch.split(batch.token_ids, batch.plan.chunk_sizes)]
        )
        hidden = F.embedding(batch.token_ids, weights["embed"]) + weights["token_types"][0]
        return hidden + F.embedding(positions, weights["positions"])

    def run_layers(self, begin: int, end: int, hidden: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """Runs the first of the layers [begin, end); also returns the next layer. [rows, hidden] -> the same."""
        return self.run_layer(begin, hidden, batch), begin + 1

    def run_layer(self, layer: int, hidden: Tensor, batch: Batch) -> Tensor:
        """Runs one layer, [rows, hidden] -> the same."""
        weights = self._weights.segment(layer + 1)
        hidden = self._norm(hidden, weights, "input_norm")
        attended = self._attention(hidden, weights, batch.plan.chunk_sizes)
        hidden = self._norm(hidden + attended, weights, "post_norm")
        inner = F.gelu(linear(hidden, weights["up"], weights["up_bias"]))
        return hidden + linear(inner, weights["down"], weights["down_bias"])

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] after the last layer -> the same."""
        return self._norm(hidden, self._weights.segment(self._config.num_segments - 1), "norm")

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("an encoder has no head, and groups that ask for tokens are refused")

    def _positions(self, prompt: Tensor) -> Tensor:
        """RoBERTa's positions count from its padding's id on, which is also the position of padding within a text."""
        padding_id = self._encoder.padding_id
        if padding_id is None:
            return torch.arange(len(prompt), device=prompt.device)
        is_token = (prompt != padding_id).long()
        return is_token.cumsum(0) * is_token + padding_id

    def _attention(self, hidden: Tensor, weights: Mapping[str, Tensor], sizes: list[int]) -> Tensor:
        heads = linear(hidden, weights["qkv"], weights["qkv_bias"]).view(len(hidden), 3, -1, self._config.head_dim)
        prompts = (prompt.permute(1, 2, 0, 3).unsqueeze(1) for prompt in torch.split(heads, sizes))
        attended = [F.scaled_dot_product_attention(*prompt)[0].transpose(0, 1).flatten(1) for prompt in prompts]
        return linear(torch.cat(attended), weights["o"], weights["o_bias"])

    def _norm(self, hidden: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
        return F.layer_norm(hidden, hidden.shape[-1:], weights[name], weights[f"{name}_bias"], self._config.norm_eps)
