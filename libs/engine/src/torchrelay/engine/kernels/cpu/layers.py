"""Whole layers in one call, for batches whose attention is computed here entirely: a decode step, or a short prompt.

Between two calls Python runs on a cache that the weights have swept, or waits for its lock: a step of 24 layers took
27.5 ms op by op and 23.7 ms layer by layer, and takes 20.5 ms in one call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, byref, c_float, c_int, c_int64, c_long, c_void_p
from typing import Final

import torch
from torch import Tensor

from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.attention import CpuPlan
from torchrelay.engine.kernels.cpu.library import DTYPES, Kernels, address
from torchrelay.engine.kernels.cpu.linear import max_kernel_rows, supports_weight
from torchrelay.engine.kernels.layer import Int8Matrix, LayerView, LayerWeights
from torchrelay.engine.kernels.workspace import Workspace
from torchrelay.modelspec.config import ModelConfig

# In the order of struct layer in kernels.c.
_WEIGHTS: Final = (
    *("input_norm", "qkv", "qkv_bias", "qk_norm", "o", "attention_out_norm"),
    *("post_norm", "gate_up", "down", "mlp_out_norm"),
)
_MATRICES: Final = ("qkv", "o", "gate_up", "down")
# Weights of one call: groups are cancelled between calls. Many rows are bound by arithmetic and get fewer weights.
MAX_CALL_BYTES: Final = 1 << 30
_FEW_ROWS: Final = 32
_PADDING: Final = 8 * 32  # numbers: each of the eight buffers begins at a cache line
_wide, _memory = Workspace(), Workspace()


class _Layer(Structure):
    _fields_ = [(name, c_void_p) for name in (*_WEIGHTS, *(f"{name}_scales" for name in _MATRICES))]


class _Shape(Structure):
    _fields_ = [
        *((name, c_long) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, c_float) for name in ("eps", "scale", "cap")),
        *((name, c_int) for name in ("dtype", "unit_offset", "is_silu")),
    ]


class _View(Structure):
    _fields_ = [(name, c_void_p) for name in ("cos", "sin", "rows", "slots", "num_slots")]


class _Batch(Structure):
    _fields_ = [
        ("num_rows", c_long),
        *((name, c_void_p) for name in ("write_slots", "views", "hidden", "kv")),
        *((name, c_long) for name in ("layer_stride", "plane")),
        *((name, c_void_p) for name in ("wide", "memory", "change")),
        ("change_seen", c_int64),
        ("adapters", c_void_p),
    ]


class CpuLayers:
    """The layers of one dense model that computes in 16 bits; its weights have 16 or 8."""

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        dtype: torch.dtype,
        kind_of_layer: Sequence[int],
        active_processes: ActiveProcesses | None,
        max_rows: int | None = None,
        max_layers: int | None = None,
    ) -> None:
        """``max_rows`` of a batch and ``max_layers`` of one call are the quickest by default."""
        self._kernels, self._active_processes = kernels, active_processes
        self._max_rows = max_rows or max_kernel_rows(kernels.level, dtype)
        has_other_norms = config.architecture.wide_qk_norm or not config.architecture.input_norms
        has_other_layers = has_other_norms or not config.rotates_whole_heads or config.multipliers.residual != 1.0
        if dtype == torch.float32 or has_other_layers:
            self._max_rows = 0  # the kernel has no fp32, no such norms, no other rotation, and no factor
        across = config.num_heads * config.head_dim
        in_kv = config.num_kv_heads * config.head_dim
        self._widest = max(config.hidden_size, config.intermediate_size, across)
        num_weights = config.hidden_size * (2 * across + 2 * in_kv + 3 * config.intermediate_size)
        self._max_layers = max_layers or max(1, MAX_CALL_BYTES // (num_weights * dtype.itemsize))
        self._numbers_per_row = (
            3 * (config.hidden_size + across + config.intermediate_size) + 2 * in_kv
        )  # as in kernels.c
        self._kinds = (c_int64 * len(kind_of_layer))(*kind_of_layer)
        self._layers = (_Layer * len(kind_of_layer))()
        # The weights at these addresses. Weak, because the pack's memory is released before this object.
        self._known: list[Callable[[], LayerWeights | None]] = [lambda: None] * len(kind_of_layer)
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

    def run(
        self,
        first: int,
        weights: Sequence[LayerWeights],
        kv: Tensor,
        hidden: Tensor,
        write_slots: Tensor,
        views: Sequence[LayerView],
        adapters: int | None = None,
    ) -> tuple[Tensor, int]:
        """Runs layers from ``first`` on; returns the hidden states, bit-equal to op by op, and the number of layers
        run.

        Stops before a layer that is not computed here, after as many layers as one call should take, or when the cores
        must be divided again. ``kv`` is [layers, 2, slots, kv_heads, head_dim]; ``hidden`` is [rows, hidden].
        ``adapters``: the address of each row's adapter. The caller keeps ``weights`` alive meanwhile: the reorder
        thread may replace them.
        """
        num_rows = hidden.shape[0]
        applies = num_rows <= self._max_rows and all(_is_all_on_cpu_kernels(view, num_rows) for view in views)
        max_layers = max(1, self._max_layers * _FEW_ROWS // max(_FEW_ROWS, num_rows))
        num_layers = self._learn(first, weights[:max_layers]) if applies else 0
        if not num_layers:
            return hidden, 0
        c_views = (_View * len(views))(
            *(_View(address(view.cos), address(view.sin), *view.attention.addresses) for view in views)
        )
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        active_processes = self._active_processes
        rows = _Batch(
            num_rows,
            address(write_slots),
            *(addressof(c_views), address(hidden), address(kv)),
            *kv.stride()[:2],
            address(_wide.of(num_rows * self._widest)),
            address(_memory.of((num_rows * self._numbers_per_row + _PADDING) // 2)),
            active_processes.change_address if active_processes else None,
            active_processes.change_seen if active_processes else 0,
            adapters,
        )
        done = self._kernels.layers(self._layers, self._kinds, first, num_layers, byref(self._shape), byref(rows))
        return hidden, done

    def _learn(self, first: int, weights: Sequence[LayerWeights]) -> int:
        """Records the addresses of these layers; returns how many are computed here, up to the first that is not."""
        if [layer() for layer in self._known[first : first + len(weights)]] == weights:  # nearly always
            return len(weights)
        for number, layer in enumerate(weights, first):
            if self._known[number]() is not layer:
                if not _is_dense(layer):
                    return number - first
                self._layers[number] = _layer(layer)
                self._known[number] = weakref.ref(layer)
        return len(weights)


def _is_all_on_cpu_kernels(view: LayerView, num_rows: int) -> bool:
    return isinstance(view.attention, CpuPlan) and view.attention.num_rows == num_rows


def _is_dense(weights: LayerWeights) -> bool:
    matrices = [getattr(weights, name) for name in _MATRICES]
    if weights.o_bias is not None or weights.down_bias is not None:
        return False
    return weights.router is None and all(
        isinstance(matrix, Tensor | Int8Matrix) and supports_weight(matrix) for matrix in matrices
    )


def _layer(weights: LayerWeights) -> _Layer:
    """The addresses of a dense layer's weights."""
    tensors = {name: getattr(weights, name) for name in _WEIGHTS}
    for name in _MATRICES:
        if isinstance(matrix := tensors[name], Int8Matrix):
            tensors |= {name: matrix.numbers, f"{name}_scales": matrix.scales}
    return _Layer(**{name: address(tensor) for name, tensor in tensors.items()})
