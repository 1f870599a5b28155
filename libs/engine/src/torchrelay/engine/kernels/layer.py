"""The inputs of a decoder layer: its weights, and its view of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Int8Matrix:
    """An [out, in] weight: ``numbers`` in int8, each times the scale of its output."""

    numbers: Tensor
    scales: Tensor  # [out], fp32

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weight rounded to ``dtype``, in memory of its own."""
        return self.numbers.to(dtype).mul_(self.scales[:, None])  # computed in fp32

    def __getitem__(self, part: int | slice) -> Int8Matrix:
        """The weights of some outputs, or of an expert if both tensors have a leading axis of experts."""
        return Int8Matrix(self.numbers[part], self.scales[part])


# An [out, in] weight, or a function from [rows, in] to [rows, out] of the same dtype with weights in its own order.
Matrix = Tensor | Int8Matrix | Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerWeights:
    """The weights of a layer. Projections are [out, in], as ``linear`` takes them."""

    input_norm: Tensor | None
    attention_out_norm: Tensor | None
    post_norm: Tensor | None  # before the MLP
    mlp_out_norm: Tensor | None
    qkv: Matrix  # queries, keys and values of all heads, stacked
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: the norm of each query and key head
    o: Matrix
    router: Tensor | None  # [experts, hidden]; with it, the next two have a leading axis of experts
    gate_up: Matrix
    down: Matrix
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    wide_qk_norm: tuple[Tensor, Tensor] | None = None  # of all queries of a row together, and of all its keys
    shared_gate: Tensor | None = None  # [1, hidden]; with it, the next two are of the expert that computes all rows
    shared_gate_up: Tensor | Int8Matrix | None = None
    shared_down: Tensor | Int8Matrix | None = None


@dataclass(frozen=True, slots=True)
class LayerView:
    """The batch as layers of one kind see it."""

    cos: Tensor  # [rows, 1, head_dim / 2]
    sin: Tensor
    attention: Any  # the plan of the attention backend
