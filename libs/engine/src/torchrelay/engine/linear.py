"""Linear layers, also where the CPU has no instructions for the weights' dtype."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 4
# Weights widened at a time: 2 MB in fp32, so that they are read again from the core's own cache.
_WIDENED_BLOCK = 1 << 19


class PackedMatrix(ABC):
    """An [out, in] weight that is not a tensor any more, but in the order that a kernel of its own reads."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], both in the dtype of ``x``."""


Matrix = Tensor | PackedMatrix


class _Scratch(threading.local):
    """Where a thread widens weights. Kept: memory taken anew for each block would be faulted in each time."""

    def __init__(self) -> None:
        self._memory = torch.empty(_WIDENED_BLOCK)

    def widen(self, block: Tensor) -> Tensor:
        """The block in fp32, until the next call."""
        if block.numel() > len(self._memory):  # one row may be longer than a block
            self._memory = torch.empty(block.numel())
        return self._memory[: block.numel()].view(block.shape).copy_(block)


_scratch = _Scratch()


def widened(block: Tensor) -> Tensor:
    """The block in fp32, in memory that this thread's next call writes over."""
    return _scratch.widen(block)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of [rows, in] and [out, in]: fp32 sums, rounded once to the dtype of ``x``."""
    if isinstance(weight, PackedMatrix):
        out = weight(x)
        return out if bias is None else out + bias
    # Few rows are bound by reading the weights, which torch's own kernels do well in any dtype.
    if len(x) < _FEW_ROWS or not x.is_cpu or has_arithmetic(x.dtype):
        return F.linear(x, weight, bias)
    return widened_linear(x, weight, bias)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with the weights widened to fp32 a block at a time.

    Where a dtype is only emulated this took, for 64 rows of bf16, a third of the time of ``F.linear``.
    """
    wide, num_rows = x.float(), max(1, _WIDENED_BLOCK // x.shape[1])
    out = torch.empty(len(x), len(weight))
    for begin in range(0, len(weight), num_rows):
        block = _scratch.widen(weight[begin : begin + num_rows])
        torch.mm(wide, block.t(), out=out[:, begin : begin + num_rows])
    return (out if bias is None else out + bias).to(x.dtype)


@cache
def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies the dtype itself. True when unknown."""
    found = torch.cpu.get_capabilities()
    wanted = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}.get(dtype)
    return wanted is None or found.get("architecture") != "x86_64" or any(found.get(name) for name in wanted)
