"""Linear layers, computed by the quickest kernel for the rows and the weight."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine.kernels.cpu.library import has_arithmetic, kernels
from torchrelay.engine.kernels.cpu.linear import FEW_ROWS, cpu_linear, max_kernel_rows, supports_weight
from torchrelay.engine.kernels.layer import Int8Matrix, Matrix
from torchrelay.engine.kernels.workspace import Workspace

# Weights that are widened at a time: 2 MB in fp32, which are then read from the core's own cache.
WIDENED_BLOCK: Final = 1 << 19
ROUNDED_BLOCK: Final = 1 << 26  # weights that another device rounds at a time: 128 MiB in 16 bits
_scratch = Workspace()


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of [rows, in] and [out, in]: fp32 sums, rounded once to the dtype of ``x``."""
    if isinstance(weight, Int8Matrix):
        return _int8_linear(x, weight, bias)
    if not isinstance(weight, Tensor):
        out = weight(x)
        return out if bias is None else out + bias
    if not x.is_cpu:
        return F.linear(x, weight, bias)
    num_rows, library = x.shape[0], kernels()
    if library is not None and supports_weight(weight) and num_rows <= max_kernel_rows(library.level, x.dtype):
        return cpu_linear(library, x, weight, bias)
    # Few rows are bound by reading the weights, which torch's kernels do well in any dtype.
    if num_rows < FEW_ROWS or has_arithmetic(x.dtype):
        return F.linear(x, weight, bias)
    return widened_linear(x, weight, bias)


def _int8_linear(x: Tensor, weight: Int8Matrix, bias: Tensor | None) -> Tensor:
    """``linear``; other devices than CPUs round the weights to the dtype of ``x``."""
    if not x.is_cpu:
        return rounded_linear(x, weight, bias)
    library = kernels()
    is_16_bit = x.dtype != torch.float32
    if library is not None and is_16_bit and supports_weight(weight) and x.shape[0] <= library.level.linear_rows:
        return cpu_linear(library, x, weight, bias)
    return widened_linear(x, weight.numbers, bias, weight.scales)


def rounded_linear(x: Tensor, weight: Int8Matrix, bias: Tensor | None, block_numel: int = ROUNDED_BLOCK) -> Tensor:
    """``linear`` with the weights rounded to the dtype of ``x`` one block at a time: of a head, all of them would take
    gigabytes.
    """
    num_out, num_rows = len(weight.numbers), max(1, block_numel // x.shape[1])
    if num_out <= num_rows:
        return F.linear(x, weight.widened(x.dtype), bias)
    out = x.new_empty(len(x), num_out)
    for begin in range(0, num_out, num_rows):
        rows = slice(begin, begin + num_rows)
        out[:, rows] = F.linear(x, weight[rows].widened(x.dtype), None if bias is None else bias[rows])
    return out


def widened_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    block_numel: int = WIDENED_BLOCK,
) -> Tensor:
    """``linear`` with the weights widened to fp32 one block at a time, and outputs times their ``scales``.

    On a CPU that only emulates bf16, 64 rows took a third of the time of ``F.linear``.
    """
    wide, num_rows = x.float(), max(1, block_numel // x.shape[1])
    out = torch.empty(len(x), len(weight))
    for begin in range(0, len(weight), num_rows):
        block = weight[begin : begin + num_rows]
        block = _scratch.of(block.numel()).view(block.shape).copy_(block)
        torch.mm(wide, block.t(), out=out[:, begin : begin + num_rows])
    if scales is not None:
        out *= scales
    return (out if bias is None else out + bias).to(x.dtype)
