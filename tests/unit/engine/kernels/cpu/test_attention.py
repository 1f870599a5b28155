"""Attention that reads pages in place, against the reference backend; ``../test_attention.py`` has the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrelay.engine.kernels.attention import Scoring, Span
from torchrelay.engine.kernels.cpu.attention import CpuAttention
from torchrelay.engine.kernels.cpu.library import Kernels
from torchrelay.engine.kernels.gather_attention import GatherAttention

CPU = torch.device("cpu")
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 200)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.002}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (37, 1)])
def test_cpu_attention_equals_reference(
    built: Kernels,
    heads: tuple[int, int],
    head_dim: int,
    cap: float | None,
    dtype: torch.dtype,
) -> None:
    """Lengths around multiples of a block, a short prompt, and a prompt that is left to the reference."""
    num_heads, num_kv_heads = heads
    random = np.random.default_rng(0)
    kv = torch.randn(2, 600, num_kv_heads, head_dim).to(dtype)
    singles = [(1, length) for length in LENGTHS]
    counts = [*singles[:4], (5, 20), (30, 90), (20, 50), *singles[4:]]
    spans, row = [], 0
    for num_rows, num_positions in counts:
        spans.append(Span(row, num_rows, random.permutation(600)[:num_positions].astype(np.int64)))
        row += num_rows
    queries = torch.randn(row, num_heads, head_dim).to(dtype)
    scoring = Scoring(head_dim**-0.5, cap)
    backend, reference = CpuAttention(16, built, max_products=1000), GatherAttention(16)
    for window in 40, None:
        plan = backend.plan(spans, window, dtype, CPU)
        assert plan.num_rows == row - 30 and len(plan.parts) == 1
        actual = backend.attend(queries, kv, plan, scoring)
        expected = reference.attend(queries, kv, reference.plan(spans, window, dtype, CPU), scoring)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.usefixtures("three_threads")
def test_heads_are_shared_between_threads(built: Kernels) -> None:
    assert torch.get_num_threads() == 3
    for heads in (8, 2), (37, 1):
        test_cpu_attention_equals_reference(built, heads, 128, None, torch.float32)


def test_many_heads_fit_on_thread_stack(built: Kernels) -> None:
    queries, kv = torch.randn(1, 1100, 1024), torch.randn(2, 3, 1, 1024)
    backend, reference, spans = CpuAttention(16, built), GatherAttention(16), [Span(0, 1, np.arange(3))]
    actual = backend.attend(queries, kv, backend.plan(spans, None, torch.float32, CPU), Scoring(0.03))
    expected = reference.attend(queries, kv, reference.plan(spans, None, torch.float32, CPU), Scoring(0.03))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow(built: Kernels) -> None:
    kv = torch.zeros(2, 40, 1, 16)
    kv[0, :, 0, 0] = torch.linspace(-3000.0, 3000.0, 40)
    kv[1, :, 0, 0] = torch.arange(40.0)
    backend = CpuAttention(16, built)
    queries = torch.zeros(1, 1, 16)
    queries[0, 0, 0] = 10.0
    plan = backend.plan([Span(0, 1, np.arange(40))], None, torch.float32, CPU)
    assert float(backend.attend(queries, kv, plan, Scoring(1.0))[0, 0]) == 39.0
    queries[0, 0, 0] = float("nan")
    assert backend.attend(queries, kv, plan, Scoring(1.0)).isnan().all()
