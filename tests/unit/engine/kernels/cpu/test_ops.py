"""The fused operations of a layer on a CPU, against the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchrelay.engine.kernels.cpu.library import Kernels
from torchrelay.engine.kernels.cpu.ops import CpuOps
from torchrelay.engine.model import mlp
from torchrelay.engine.model.decoder import rms_norm
from torchrelay.engine.model.rope import rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.01, torch.float16: 0.002}  # a rounding to the other side
SIZES = [(1, 64), (5, 96), (3, 4097), (40, 1024), (0, 64)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norms_equal_plain(built: Kernels, num_rows: int, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    steps = CpuOps(built)
    x, added = (random(num_rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = random(size, dtype=dtype, seed=3)
    assert_close(steps.rms_norm(x, weight, 1e-5, unit_offset), rms_norm(x, weight, 1e-5, unit_offset))
    total, normed = steps.add_norm(x, added, weight, 1e-5, unit_offset)
    assert torch.equal(total, x + added)
    assert_close(normed, rms_norm(x + added, weight, 1e-5, unit_offset))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_rounded_exactly(built: Kernels, dtype: torch.dtype) -> None:
    """Adds pairs of all numbers: subnormal, halfway between two, beyond the largest, and NaN."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    for shift in (0, 1, 777, 1 << 13, 1 << 15):
        x, added = numbers.view(64, -1), numbers.roll(shift).view(64, -1)
        total = CpuOps(built).add_norm(x, added, numbers[:1024], 1e-5, False)[0]
        torch.testing.assert_close(total, x + added, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("normed", "unit_offset"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 24), (3, 3, 16), (1, 1, 8), (16, 8, 64)])
@pytest.mark.parametrize("num_rows", [3, 40])
def test_placed_heads_equal_plain(
    built: Kernels,
    num_rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    normed: bool,
    unit_offset: bool,
    dtype: torch.dtype,
) -> None:
    together = random(num_rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    norms = random(heads + kv_heads, head_dim, dtype=dtype, seed=1) if normed else None
    turns = torch.rand(num_rows, 1, head_dim // 2)
    cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:num_rows]
    kv = torch.zeros(3, 2, 50, kv_heads, head_dim, dtype=dtype)[1]
    queries = CpuOps(built).place_heads(together, norms, (1e-6, unit_offset), (cos, sin), kv, slots)

    turned = together[:, : heads + kv_heads]
    turned = rotate(turned if norms is None else rms_norm(turned, norms, 1e-6, unit_offset), cos, sin)
    expected = torch.zeros(2, 50, kv_heads, head_dim, dtype=dtype)
    expected[0, slots] = turned[:, heads:]
    expected[1, slots] = together[:, heads + kv_heads :]
    assert_close(queries, turned[:, :heads])
    assert_close(kv[0], expected[0])
    assert torch.equal(kv[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 7), (3, 1500), (30, 2816), (0, 8)])
def test_gates_equal_plain(built: Kernels, num_rows: int, size: int, activation: str, dtype: torch.dtype) -> None:
    both = 3 * random(num_rows, 2 * size, dtype=dtype)
    expected = mlp.activate_and_multiply(both, activation)
    assert_close(CpuOps(built).gate(both, activation), expected)


@pytest.mark.usefixtures("three_threads")
def test_rows_are_shared_between_threads(built: Kernels) -> None:
    assert torch.get_num_threads() == 3
    for dtype in DTYPES:
        test_norms_equal_plain(built, 40, 1024, False, dtype)
        test_placed_heads_equal_plain(built, 40, 16, 8, 64, True, False, dtype)
        test_gates_equal_plain(built, 30, 2816, "silu", dtype)


@pytest.mark.parametrize("x", [-3e38, -300.0, -88.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 88.5, 300.0, 3e38, float("nan")])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates_of_extreme_values_equal_plain(built: Kernels, activation: str, x: float) -> None:
    both = torch.tensor([[x, 1.0]])
    assert_close(CpuOps(built).gate(both, activation), mlp.activate_and_multiply(both, activation))


def test_infinity_stays_infinite(built: Kernels) -> None:
    steps = CpuOps(built)
    for value in (float("inf"), -float("inf"), float("nan")):
        x = torch.tensor([[value, 1.0, 2.0, 3.0]])
        assert not steps.rms_norm(x, torch.ones(4), 1e-5, False).isfinite().all()
        assert not steps.gate(torch.tensor([[1.0, value]]), "silu").isfinite().any()
    assert not steps.gate(torch.tensor([[float("inf"), 1.0]]), "silu").isfinite().any()
