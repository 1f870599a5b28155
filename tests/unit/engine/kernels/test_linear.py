from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torchrelay.engine.kernels.cpu.library import has_arithmetic
from torchrelay.engine.kernels.linear import linear, widened_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_widened_linear_equals_plain(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    """Within one rounding of the dtype; blocks that do not divide the rows of the weight."""
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(30, 48).to(dtype)
    bias = torch.randn(30).to(dtype) if with_bias else None
    actual = widened_linear(x, weight, bias, block_numel=48 * 7)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.dtype == dtype
    assert torch.allclose(actual.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert torch.allclose(actual.double(), linear(x, weight, bias).double(), rtol=4 * torch.finfo(dtype).eps, atol=1e-2)


def test_fp32_arithmetic_is_native() -> None:
    assert has_arithmetic(torch.float32)
