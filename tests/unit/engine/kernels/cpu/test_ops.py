"""The fused operations of a layer on a CPU, against the plain ones."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.kernels.fused_ops_checks import DTYPES, FusedOpsChecks
from torchrelay.engine.kernels.cpu.library import Kernels
from torchrelay.engine.kernels.cpu.ops import CpuOps
from torchrelay.engine.model import mlp

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.01, torch.float16: 0.002}  # a rounding to the other side
SIZES = [(1, 64), (5, 96), (3, 4097), (40, 1024), (0, 64)]


def checks(built: Kernels) -> FusedOpsChecks:
    return FusedOpsChecks(CpuOps(built), TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms_equal_plain(built: Kernels, num_rows: int, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    checks(built).norms(num_rows, size, unit_offset, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_rounded_exactly(built: Kernels, dtype: torch.dtype) -> None:
    """Adds pairs of all numbers: subnormal, halfway between two, beyond the largest, and NaN."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    for shift in (0, 1, 777, 1 << 13, 1 << 15):
        x, added = numbers.view(64, -1), numbers.roll(shift).view(64, -1)
        total = CpuOps(built).add_norm(x, added, numbers[:1024], 1e-5, False)[0]
        torch.testing.assert_close(total, x + added, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [(False, False), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 24), ((3, 3), 16), ((1, 1), 8), ((16, 8), 64)], ids=str)
@pytest.mark.parametrize("num_rows", [3, 40])
def test_placed_heads_equal_plain(
    built: Kernels, num_rows: int, heads: tuple[int, int], head_dim: int, norm: tuple[bool, bool], dtype: torch.dtype
) -> None:
    checks(built).placed_heads(num_rows, heads, head_dim, norm, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 7), (3, 1500), (30, 2816), (0, 8)])
def test_gates_equal_plain(built: Kernels, num_rows: int, size: int, activation: str, dtype: torch.dtype) -> None:
    checks(built).gates(num_rows, size, activation, dtype)


@pytest.mark.usefixtures("three_threads")
def test_rows_are_shared_between_threads(built: Kernels) -> None:
    assert torch.get_num_threads() == 3
    for dtype in DTYPES:
        checks(built).norms(40, 1024, False, dtype)
        checks(built).placed_heads(40, (16, 8), 64, (True, False), dtype)
        checks(built).gates(30, 2816, "silu", dtype)


@pytest.mark.parametrize("x", [-3e38, -300.0, -88.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 88.5, 300.0, 3e38, float("nan")])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates_of_extreme_values_equal_plain(built: Kernels, activation: str, x: float) -> None:
    both = torch.tensor([[x, 1.0]])
    checks(built).assert_close(CpuOps(built).gate(both, activation), mlp.activate_and_multiply(both, activation))


def test_infinity_stays_infinite(built: Kernels) -> None:
    steps = CpuOps(built)
    for value in (float("inf"), -float("inf"), float("nan")):
        x = torch.tensor([[value, 1.0, 2.0, 3.0]])
        assert not steps.rms_norm(x, torch.ones(4), 1e-5, False).isfinite().all()
        assert not steps.gate(torch.tensor([[1.0, value]]), "silu").isfinite().any()
    assert not steps.gate(torch.tensor([[float("inf"), 1.0]]), "silu").isfinite().any()
