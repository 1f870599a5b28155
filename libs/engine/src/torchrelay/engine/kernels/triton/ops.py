"""Fused operations on a GPU, each of which would take several launches with torch."""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from torchrelay.engine.kernels.fused_ops import Angles, FusedOps, NormKind
from torchrelay.engine.kernels.triton import op_kernels

_GATE_BLOCK: Final = 1024


class TritonOps(FusedOps):
    """Triton kernels, compiled on first use."""

    def place_heads(
        self, heads: Tensor, norms: Tensor | None, norm_kind: NormKind, angles: Angles, kv: Tensor, slots: Tensor
    ) -> Tensor:
        num_rows, num_all, head_dim = heads.shape
        num_kv_heads, half = kv.shape[2], head_dim // 2
        num_heads = num_all - 2 * num_kv_heads
        heads = heads.contiguous()
        queries = heads.new_empty(num_rows, num_heads, head_dim)
        op_kernels.place_heads[(num_rows, num_all)](
            heads,
            heads if norms is None else norms,
            *angles,
            slots,
            kv,
            queries,
            norm_kind[0],
            kv.stride(0),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            NORMED=norms is not None,
            UNIT_OFFSET=norm_kind[1],
            num_warps=1,
        )
        return queries

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(num_rows, size)
        if num_rows:
            op_kernels.gate_rows[(num_rows, triton.cdiv(size, _GATE_BLOCK))](
                gate_up, out, SIZE=size, BLOCK=_GATE_BLOCK, SILU=activation == "silu", num_warps=4
            )
        return out

    def add_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        size = x.shape[-1]
        out = torch.empty_like(x)
        total = x if added is None else torch.empty_like(x)
        block = triton.next_power_of_2(size)
        if len(x):
            op_kernels.norm_rows[(x.numel() // size,)](
                x,
                x if added is None else added.contiguous(),
                weight,
                total,
                out,
                eps,
                SIZE=size,
                BLOCK=block,
                ADDS=added is not None,
                UNIT_OFFSET=unit_offset,
                num_warps=min(max(block // 512, 1), 16),
            )
        return total, out
