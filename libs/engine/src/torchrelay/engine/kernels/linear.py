"""Linear layers, also where the CPU has no instructions for the weights' dtype."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine.kernels.cpu.library import IsaLevel, kernels
from torchrelay.engine.kernels.cpu.linear import cpu_linear, supports_weight
from torchrelay.engine.kernels.workspace import Workspace

_FEW_ROWS = 4
# Weights widened at a time: 2 MB in fp32, so that they are read again from the core's own cache.
_WIDENED_BLOCK = 1 << 19


class PackedMatrix(ABC):
    """An [out, in] weight that is not a tensor any more, but in the order that a kernel of its own reads."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], both in the dtype of ``x``."""


Matrix = Tensor | PackedMatrix


_scratch = Workspace()


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of [rows, in] and [out, in]: fp32 sums, rounded once to the dtype of ``x``."""
    if isinstance(weight, PackedMatrix):
        out = weight(x)
        return out if bias is None else out + bias
    if not x.is_cpu:
        return F.linear(x, weight, bias)
    num_rows, found = x.shape[0], kernels()
    if found is not None and supports_weight(weight) and num_rows <= max_kernel_rows(found.level, x.dtype):
        return cpu_linear(found, x, weight, bias)
    # Few rows are bound by reading the weights, which torch's own kernels do in any dtype.
    if num_rows < _FEW_ROWS or has_arithmetic(x.dtype):
        return F.linear(x, weight, bias)
    return widened_linear(x, weight, bias)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with the weights widened to fp32 a block at a time.

    Where a dtype is only emulated this took, for 64 rows of bf16, a third of the time of ``F.linear``.
    """
    wide, num_rows = x.float(), max(1, _WIDENED_BLOCK // x.shape[1])
    out = torch.empty(len(x), len(weight))
    for begin in range(0, len(weight), num_rows):
        block = weight[begin : begin + num_rows]
        block = _scratch.of(block.numel()).view(block.shape).copy_(block)
        torch.mm(wide, block.t(), out=out[:, begin : begin + num_rows])
    return (out if bias is None else out + bias).to(x.dtype)


def max_kernel_rows(level: IsaLevel, dtype: torch.dtype) -> int:
    """For which the kernels are quickest: few are bound by reading the weights, and many by arithmetic."""
    return _FEW_ROWS if has_arithmetic(dtype) else level.linear_rows


@cache
def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies the dtype itself. True when unknown."""
    found = torch.cpu.get_capabilities()
    wanted = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}.get(dtype)
    return wanted is None or found.get("architecture") != "x86_64" or any(found.get(name) for name in wanted)
