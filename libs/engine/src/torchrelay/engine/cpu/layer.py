"""A whole layer in one call, for rows that each are the last of their sequence: a decode step.

Between two calls Python runs with whatever the weights that streamed by have left in the cache: a step of 24 layers
took 27.5 ms by its steps, and takes 24 like this.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int, c_long, c_void_p
from typing import Final

import torch
from torch import Tensor

from torchrelay.engine.batch import Batch, LayerView
from torchrelay.engine.cpu.attention import CpuPlan
from torchrelay.engine.cpu.kernels import DTYPES, Kernels, address
from torchrelay.engine.cpu.linear import takes
from torchrelay.engine.linear import most_rows
from torchrelay.engine.scratch import Scratch
from torchrelay.engine.weights import LayerWeights
from torchrelay.transfer.model_config import ModelConfig

_WEIGHTS: Final = (
    "input_norm",
    "qkv",
    "qkv_bias",
    "qk_norm",
    "o",
    "attention_out_norm",
    "post_norm",
    "gate_up",
    "down",
    "mlp_out_norm",
)
_PADDING: Final = 8 * 32  # numbers: each of the eight results begins with a line of the cache
_wide, _memory = Scratch(), Scratch()


class _Layer(Structure):
    _fields_ = [(name, c_void_p) for name in _WEIGHTS]


class _Shape(Structure):
    _fields_ = [
        *((name, c_long) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, c_float) for name in ("eps", "scale", "cap")),
        *((name, c_int) for name in ("dtype", "unit_offset", "is_silu")),
    ]


class _Rows(Structure):
    _fields_ = [
        ("count", c_long),
        *((name, c_void_p) for name in ("cos", "sin", "write_slots", "places", "slots", "num_slots")),
    ]


class CpuLayer:
    """The layers of one dense model whose weights have 16 bits."""

    def __init__(self, kernels: Kernels, config: ModelConfig, dtype: torch.dtype) -> None:
        self._kernels = kernels
        self._most_rows = most_rows(kernels.level, dtype)
        across = config.num_heads * config.head_dim
        in_kv = config.num_kv_heads * config.head_dim
        self._widest = max(config.hidden_size, config.intermediate_size, across)
        self._room = 3 * (config.hidden_size + across + config.intermediate_size) + 2 * in_kv  # as kernels.c divides it
        self._shape = _Shape(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.norm_eps,
            config.query_scale,
            config.score_cap or 0.0,
            DTYPES[dtype],
            config.architecture.unit_offset_norms,
            config.activation == "silu",
        )

    def run(self, weights: LayerWeights, kv: Tensor, hidden: Tensor, batch: Batch, view: LayerView) -> Tensor | None:
        """``Decoder.run_layer``, bit for bit as step by step; None for what it does not compute."""
        num_rows = hidden.shape[0]
        if not self._applies(weights, num_rows, view):
            return None
        plan: CpuPlan = view.attention
        hidden = hidden.contiguous()
        out = hidden.new_empty(hidden.shape)
        rows = _Rows(num_rows, address(view.cos), address(view.sin), address(batch.write_slots), *plan.addresses)
        self._kernels.layer(
            byref(_Layer(*(address(getattr(weights, name)) for name in _WEIGHTS))),
            byref(self._shape),
            byref(rows),
            address(hidden),
            address(kv),
            kv.stride(0),
            address(_wide.of(num_rows * self._widest)),
            address(_memory.of((num_rows * self._room + _PADDING) // 2)),
            address(out),
        )
        return out

    def _applies(self, weights: LayerWeights, num_rows: int, view: LayerView) -> bool:
        matrices = weights.qkv, weights.o, weights.gate_up, weights.down
        return (
            isinstance(view.attention, CpuPlan)
            and len(view.attention.singles) == num_rows
            and weights.router is None
            and all(isinstance(matrix, Tensor) and takes(matrix) for matrix in matrices)
            and num_rows <= self._most_rows
        )
