"""Fused operations on a CPU, where a torch call costs more than its arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrelay.engine.kernels.cpu.library import DTYPES, Kernels, address
from torchrelay.engine.kernels.fused_ops import Angles, FusedOps, NormKind


class CpuOps(FusedOps):
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def place_heads(
        self, heads: Tensor, norms: Tensor | None, norm_kind: NormKind, angles: Angles, kv: Tensor, slots: Tensor
    ) -> Tensor:
        num_rows, num_all, head_dim = heads.shape
        num_kv_heads = kv.shape[2]
        num_heads = num_all - 2 * num_kv_heads
        heads = heads.contiguous()
        queries = heads.new_empty(num_rows, num_heads, head_dim)
        self._kernels.place_heads(
            DTYPES[heads.dtype],
            address(heads),
            address(norms),
            *norm_kind,
            *map(address, angles),
            address(slots),
            address(kv),
            kv.stride(0),
            address(queries),
            num_rows,
            num_heads,
            num_kv_heads,
            head_dim,
        )
        return queries

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(num_rows, size)
        numbers = DTYPES[gate_up.dtype], address(gate_up), num_rows, size
        self._kernels.gate(*numbers, activation == "silu", address(out))
        return out

    def add_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        added = None if added is None else added.contiguous()
        out = torch.empty_like(x)
        total = x if added is None else torch.empty_like(x)
        self._kernels.norm(
            DTYPES[x.dtype],
            address(x),
            address(added),
            address(weight),
            x.numel() // x.shape[-1],
            x.shape[-1],
            eps,
            unit_offset,
            address(total),
            address(out),
        )
        return total, out
