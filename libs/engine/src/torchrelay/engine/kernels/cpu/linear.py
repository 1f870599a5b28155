"""Linear layers with weights of 16 or 8 bits, read in place and widened on their way into the core."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from torchrelay.engine.kernels.cpu.library import DTYPES, IsaLevel, Kernels, address, has_arithmetic
from torchrelay.engine.kernels.layer import Int8Matrix
from torchrelay.engine.kernels.workspace import Workspace

FEW_ROWS: Final = 4
_STEP: Final = 32  # weights of a row taken at a time, at most
_scratch = Workspace()


def supports_weight(weight: Tensor | Int8Matrix) -> bool:
    """Whether the kernel takes an [out, in] weight. For fp32 torch's kernel is as quick."""
    if isinstance(weight, Int8Matrix):
        return weight.numbers.shape[1] % _STEP == 0
    return weight.dtype != torch.float32 and weight.shape[1] % _STEP == 0


def max_kernel_rows(level: IsaLevel, dtype: torch.dtype) -> int:
    """The number of rows up to which the kernel is quickest: few are bound by reading weights, many by arithmetic."""
    return FEW_ROWS if has_arithmetic(dtype) else level.linear_rows


def cpu_linear(kernels: Kernels, x: Tensor, weight: Tensor | Int8Matrix, bias: Tensor | None) -> Tensor:
    """``linear`` of [rows, in] and [out, in]. A row's result does not depend on the other rows."""
    numbers, scales = (weight.numbers, weight.scales) if isinstance(weight, Int8Matrix) else (weight, None)
    (num_rows, size), num_out = x.shape, numbers.shape[0]
    x = x.contiguous()
    out = x.new_empty(num_rows, num_out)
    kernels.linear(
        DTYPES[x.dtype],
        address(x),
        num_rows,
        size,
        address(numbers),
        address(scales),
        num_out,
        address(bias),
        address(_scratch.of(x.numel())),
        address(out),
    )
    return out
