"""Comparisons of fused operations with the plain operations of ``model``, for any device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrelay.engine.kernels.fused_ops import FusedOps
from torchrelay.engine.model import mlp
from torchrelay.engine.model.decoder import rms_norm
from torchrelay.engine.model.rope import rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_SLOTS = 50


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class FusedOpsChecks:
    """Checks of ``ops`` on a device; sums of two tensors are compared exactly if ``exact_sums``."""

    ops: FusedOps
    tolerance: Mapping[torch.dtype, float]
    device: str = "cpu"
    exact_sums: bool = True

    def assert_close(self, actual: Tensor, expected: Tensor) -> None:
        tolerance = self.tolerance[expected.dtype]
        torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)

    def norms(self, num_rows: int, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
        x, added = (random(num_rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
        weight = random(size, dtype=dtype, seed=3)
        here, other, factors = x.to(self.device), added.to(self.device), weight.to(self.device)
        self.assert_close(self.ops.rms_norm(here, factors, 1e-5, unit_offset), rms_norm(x, weight, 1e-5, unit_offset))
        total, normed = self.ops.add_norm(here, other, factors, 1e-5, unit_offset)
        if self.exact_sums:
            assert torch.equal(total.cpu(), x + added)
        self.assert_close(total, x + added)
        self.assert_close(normed, rms_norm(x + added, weight, 1e-5, unit_offset))

    def placed_heads(
        self, num_rows: int, heads: tuple[int, int], head_dim: int, norm: tuple[bool, bool], dtype: torch.dtype
    ) -> None:
        """``heads``: query heads and kv heads; ``norm``: whether heads are normed, and with a unit offset."""
        (num_heads, kv_heads), (is_normed, unit_offset) = heads, norm
        together = random(num_rows, num_heads + 2 * kv_heads, head_dim, dtype=dtype)
        norms = random(num_heads + kv_heads, head_dim, dtype=dtype, seed=1) if is_normed else None
        turns = torch.rand(num_rows, 1, head_dim // 2)
        cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
        slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(0))[:num_rows]
        kv = torch.zeros(3, 2, NUM_SLOTS, kv_heads, head_dim, dtype=dtype, device=self.device)[1]
        angles = cos.to(self.device), sin.to(self.device)
        given = None if norms is None else norms.to(self.device)
        queries = self.ops.place_heads(
            together.to(self.device), given, (1e-6, unit_offset), angles, kv, slots.to(self.device)
        )

        turned = together[:, : num_heads + kv_heads]
        turned = rotate(turned if norms is None else rms_norm(turned, norms, 1e-6, unit_offset), cos, sin)
        expected = torch.zeros(2, NUM_SLOTS, kv_heads, head_dim, dtype=dtype)
        expected[0, slots] = turned[:, num_heads:]
        expected[1, slots] = together[:, num_heads + kv_heads :]
        self.assert_close(queries, turned[:, :num_heads])
        self.assert_close(kv[0], expected[0])
        assert torch.equal(kv[1].cpu(), expected[1])

    def gates(self, num_rows: int, size: int, activation: str, dtype: torch.dtype) -> None:
        both = 3 * random(num_rows, 2 * size, dtype=dtype)
        self.assert_close(self.ops.gate(both.to(self.device), activation), mlp.activate_and_multiply(both, activation))
