"""The fused operations of a layer against the plain ones, on a CPU and in Triton's interpreter (or on a GPU)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.unit.engine.harness import ModelOf, assert_batch_is_exact
from tests.unit.engine.kernels.test_attention import CPU, DEVICE
from torchrelay.engine.kernels.backends import backends_for
from torchrelay.engine.kernels.cpu.library import LEVELS, Kernels
from torchrelay.engine.kernels.cpu.ops import CpuOps
from torchrelay.engine.kernels.fused_ops import FusedOps
from torchrelay.engine.model.decoder import rms_norm
from torchrelay.engine.model.mlp import activate_and_multiply
from torchrelay.engine.model.rope import rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = ["silu", "gelu_pytorch_tanh"]
NUM_SLOTS = 50


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Backend:
    """Fused operations on a device; sums of two tensors are compared exactly if ``exact_sums``."""

    ops: FusedOps
    tolerance: Mapping[torch.dtype, float]  # a rounding to the other side
    device: torch.device = CPU
    exact_sums: bool = True

    def assert_close(self, actual: Tensor, expected: Tensor) -> None:
        tolerance = self.tolerance[expected.dtype]
        torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


CPU_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.01, torch.float16: 0.002}
BACKENDS = {level.name: Backend(CpuOps(Kernels(level)), CPU_TOLERANCE) for level in LEVELS if level.runs_here}
if sys.platform == "linux":
    from torchrelay.engine.kernels.triton.ops import TritonOps

    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.04, torch.float16: 0.005}
    # NOTE: the interpreter truncates bf16 where devices round it, so sums are not exact.
    BACKENDS["triton"] = Backend(TritonOps(), tolerance, DEVICE, exact_sums=False)
all_backends = pytest.mark.parametrize("name", BACKENDS)


@all_backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_plain(name: str, dtype: torch.dtype) -> None:
    backend = BACKENDS[name]
    ops, device = backend.ops, backend.device
    for num_rows, size in [(1, 64), (5, 96), (3, 4097), (0, 64)] + [(40, 1024)] * (name != "triton"):
        x, added = (random(num_rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
        weight = random(size, dtype=dtype, seed=3)
        here, other, factors = x.to(device), added.to(device), weight.to(device)
        for unit_offset in (False, True):
            backend.assert_close(ops.rms_norm(here, factors, 1e-5, unit_offset), rms_norm(x, weight, 1e-5, unit_offset))
            total, normed = ops.add_norm(here, other, factors, 1e-5, unit_offset)
            assert torch.equal(total.cpu(), x + added) or not backend.exact_sums
            backend.assert_close(total, x + added)
            backend.assert_close(normed, rms_norm(x + added, weight, 1e-5, unit_offset))


@all_backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [(False, False), (True, False), (True, True)], ids=str)
def test_placed_heads_equal_plain(name: str, norm: tuple[bool, bool], dtype: torch.dtype) -> None:
    """``norm``: whether heads are normed, and with a unit offset."""
    for num_rows, num_heads, kv_heads, head_dim in [(3, 4, 2, 24), (3, 3, 3, 16), (3, 1, 1, 8)] + [
        (40, 4, 2, 24),
        (40, 16, 8, 64),
    ] * (name != "triton"):
        assert_placed_heads_equal_plain(BACKENDS[name], num_rows, num_heads, kv_heads, head_dim, norm, dtype)


def assert_placed_heads_equal_plain(
    backend: Backend,
    num_rows: int,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    norm: tuple[bool, bool],
    dtype: torch.dtype,
) -> None:
    device, (is_normed, unit_offset) = backend.device, norm
    together = random(num_rows, num_heads + 2 * kv_heads, head_dim, dtype=dtype)
    norms = random(num_heads + kv_heads, head_dim, dtype=dtype, seed=1) if is_normed else None
    turns = torch.rand(num_rows, 1, head_dim // 2)
    cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(0))[:num_rows]
    kv = torch.zeros(3, 2, NUM_SLOTS, kv_heads, head_dim, dtype=dtype, device=device)[1]
    given, angles = None if norms is None else norms.to(device), (cos.to(device), sin.to(device))
    queries = backend.ops.place_heads(together.to(device), given, (1e-6, unit_offset), angles, kv, slots.to(device))

    turned = together[:, : num_heads + kv_heads]
    turned = rotate(turned if norms is None else rms_norm(turned, norms, 1e-6, unit_offset), cos, sin)
    expected = torch.zeros(2, NUM_SLOTS, kv_heads, head_dim, dtype=dtype)
    expected[0, slots] = turned[:, num_heads:]
    expected[1, slots] = together[:, num_heads + kv_heads :]
    backend.assert_close(queries, turned[:, :num_heads])
    backend.assert_close(kv[0], expected[0])
    assert torch.equal(kv[1].cpu(), expected[1])


@all_backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_equal_plain(name: str, activation: str, dtype: torch.dtype) -> None:
    backend = BACKENDS[name]
    for num_rows, size in [(1, 7), (3, 1500), (0, 8)] + [(30, 2816)] * (name != "triton"):
        both = 3 * random(num_rows, 2 * size, dtype=dtype)
        actual = backend.ops.gate(both.to(backend.device), activation)
        backend.assert_close(actual, activate_and_multiply(both, activation))


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("name", sorted(BACKENDS.keys() - {"triton"}))
def test_rows_are_shared_between_threads(name: str) -> None:
    assert torch.get_num_threads() == 3
    for dtype in DTYPES:
        test_norms_equal_plain(name, dtype)
        test_placed_heads_equal_plain(name, (True, False), dtype)
        test_gates_equal_plain(name, "silu", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_rounded_exactly(built: Kernels, dtype: torch.dtype) -> None:
    """Adds pairs of all numbers: subnormal, halfway between two, beyond the largest, and NaN."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    for shift in (0, 1, 777, 1 << 13, 1 << 15):
        x, added = numbers.view(64, -1), numbers.roll(shift).view(64, -1)
        total = CpuOps(built).add_norm(x, added, numbers[:1024], 1e-5, False)[0]
        torch.testing.assert_close(total, x + added, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_extreme_values_equal_plain(built: Kernels, activation: str) -> None:
    for x in (-3e38, -300.0, -88.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 88.5, 300.0, 3e38, float("nan")):
        both = torch.tensor([[x, 1.0]])
        BACKENDS[built.level.name].assert_close(
            CpuOps(built).gate(both, activation), activate_and_multiply(both, activation)
        )


def test_infinity_stays_infinite(built: Kernels) -> None:
    steps = CpuOps(built)
    for value in (float("inf"), -float("inf"), float("nan")):
        x = torch.tensor([[value, 1.0, 2.0, 3.0]])
        assert not steps.rms_norm(x, torch.ones(4), 1e-5, False).isfinite().all()
        assert not steps.gate(torch.tensor([[1.0, value]]), "silu").isfinite().any()
    assert not steps.gate(torch.tensor([[float("inf"), 1.0]]), "silu").isfinite().any()


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton exists for Linux only")
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_decoder_with_triton_ops_is_exact(model_of: ModelOf, family: str) -> None:
    """Prompts in chunks beside decodes: greedy output is still transformers'."""
    model, backends = model_of(family), replace(backends_for(DEVICE), fused_ops=BACKENDS["triton"].ops)
    instance = model.instance(token_budget=8, device=str(DEVICE), backends=backends)
    assert_batch_is_exact(model, instance, (1, 10), num_tokens=3)
