"""Every attention backend against the definition; Triton runs in its interpreter, or on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.harness import DEVICES, ModelOf, assert_batch_is_exact
from torchrelay.engine.kernels.attention import AttentionBackend, Scoring, Span
from torchrelay.engine.kernels.backends import attention_backend, backends_for
from torchrelay.engine.kernels.cpu.attention import CpuAttention
from torchrelay.engine.kernels.cpu.library import LEVELS, Kernels

CPU = torch.device("cpu")
DEVICE = torch.device(DEVICES[-1])  # of Triton's kernels
PAGE = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.02}
CPU_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.002}
Shapes = Sequence[tuple[int, int]]  # (rows, positions) per sequence


@dataclass(frozen=True)
class Backend:
    """A backend for pages of a size, and the device that it computes on."""

    made: Callable[[int], AttentionBackend]
    device: torch.device = CPU
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)


BACKENDS = {"gather": Backend(lambda page: attention_backend("gather")(page))}
BACKENDS |= {
    level.name: Backend(partial(CpuAttention, library=Kernels(level), max_products=1000), CPU, CPU_TOLERANCE)
    for level in LEVELS
    if level.runs_here
}
if sys.platform == "linux":  # Triton exists for Linux only
    BACKENDS["triton"] = Backend(lambda page: attention_backend("triton")(page), DEVICE)
all_backends = pytest.mark.parametrize("name", BACKENDS)


def definition(
    queries: torch.Tensor, kv: torch.Tensor, spans: Sequence[Span], window: int | None, scoring: Scoring
) -> torch.Tensor:
    """Attention in fp64, a sequence at a time."""
    out = torch.empty(queries.shape, dtype=torch.float64)
    for span in spans:
        rows, num_positions = slice(span.first_row, span.first_row + span.num_rows), len(span.slots)
        keys, values = kv[:, span.slots].double().repeat_interleave(queries.shape[1] // kv.shape[2], 2)
        scores = torch.einsum("rhd,phd->hrp", queries[rows].double(), keys) * scoring.scale
        if scoring.cap:
            scores = scoring.cap * (scores / scoring.cap).tanh()
        places = torch.arange(num_positions)
        distances = places[num_positions - span.num_rows :, None] - places
        is_hidden = (distances < 0) | (distances >= (window or num_positions))
        shares = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hrp,phd->rhd", shares, values)
    return out.flatten(1)


def assert_equals_definition(
    name: str,
    shapes: Shapes,
    window: int | None = None,
    cap: float | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Scatters the pages. Unused slots hold NaN, as another model's bytes may: they must not be read."""
    num_heads, num_kv_heads = heads
    random, page_counts = np.random.default_rng(1), [-(-num_positions // PAGE) for _, num_positions in shapes]
    torch.manual_seed(1)
    pages = np.split(random.permutation(sum(page_counts) + 2), np.cumsum(page_counts))
    kv = torch.full((2, (sum(page_counts) + 2) * PAGE, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    spans, row = [], 0
    for (num_rows, num_positions), own in zip(shapes, pages, strict=False):
        slots = (own[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:num_positions].astype(np.int64)
        kv[:, slots] = torch.randn(2, num_positions, num_kv_heads, head_dim).to(dtype)
        spans.append(Span(row, num_rows, slots))
        row += num_rows
    queries = torch.randn(row, num_heads, head_dim).to(dtype)
    scoring, device, backend = Scoring(head_dim**-0.5, cap), BACKENDS[name].device, BACKENDS[name].made(PAGE)
    plan = backend.plan(spans, window, dtype, device)
    actual = backend.attend(queries.to(device), kv.to(device), plan, scoring)
    assert actual.dtype == dtype
    expected = definition(queries, kv, spans, window, scoring)
    tolerance = BACKENDS[name].tolerance[dtype]
    torch.testing.assert_close(actual.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@all_backends
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((1, 1), 24), ((3, 3), 8), ((8, 2), 64), ((5, 1), 24), ((40, 2), 8)], ids=str
)
def test_head_counts_and_sizes(name: str, heads: tuple[int, int], head_dim: int) -> None:
    assert_equals_definition(name, [(1, 7), (1, 90), (9, 20)], heads=heads, head_dim=head_dim)


@all_backends
@pytest.mark.parametrize(("window", "cap"), [(None, None), (None, 0.7), (1, None), (5, 0.7), (33, 0.7), (1000, None)])
def test_windows_and_caps(name: str, window: int | None, cap: float | None) -> None:
    assert_equals_definition(name, [(1, 1), (1, 6), (1, 70), (5, 5), (33, 80), (1, 2)], window, cap)


@all_backends
@pytest.mark.parametrize(("num_rows", "window"), [(2, None), (127, None), (128, 40), (129, None), (200, 40)])
def test_prompts_longer_than_tile(name: str, num_rows: int, window: int | None) -> None:
    assert_equals_definition(name, [(num_rows, num_rows + 37), (3, 3)], window, heads=(2, 1), head_dim=64)


@all_backends
@pytest.mark.parametrize("num_positions", [1, 4, 5, 127, 128, 129, 700])
def test_single_sequence_lengths(name: str, num_positions: int) -> None:
    assert_equals_definition(name, [(1, num_positions)], heads=(2, 1))


@all_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_dtypes(name: str, dtype: torch.dtype) -> None:
    assert_equals_definition(name, [(1, 1), (1, 90), (40, 60)], cap=5.0, dtype=dtype)


@all_backends
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1])),
        min_size=1,
        max_size=4,
    ),
    window=st.none() | st.integers(1, 70),
    cap=st.none() | st.floats(0.5, 50),
    heads=st.sampled_from([(2, 1), (2, 2), (6, 2)]),
)
def test_random_batches(
    name: str, shapes: Shapes, window: int | None, cap: float | None, heads: tuple[int, int]
) -> None:
    assert_equals_definition(name, shapes, window, cap, heads)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 96, 128, 256])
@pytest.mark.parametrize("level", [name for name in BACKENDS if name not in ("gather", "triton")])
def test_each_loop_of_the_cpu_kernels(level: str, head_dim: int) -> None:
    """Heads of every size; lengths around multiples of a block; a prompt that is left to the reference."""
    shapes = [(1, 1), (1, 2), (1, 15), (1, 16), (5, 20), (30, 90), (20, 50), (1, 17), (1, 31), (1, 33), (1, 64)]
    for dtype in TOLERANCE:
        for heads, window, cap in (((8, 8), 40, None), ((8, 2), None, 2.0), ((37, 1), None, None)):
            assert_equals_definition(level, shapes, window, cap, heads, head_dim, dtype)


def test_long_prompts_are_left_to_the_reference(built: Kernels) -> None:
    spans = [Span(0, 1, np.arange(9)), Span(1, 30, np.arange(90)), Span(31, 5, np.arange(20))]
    plan = CpuAttention(16, built, max_products=1000).plan(spans, None, torch.float32, CPU)
    assert plan.num_rows == 1 + 5 and len(plan.parts) == 1


@pytest.mark.usefixtures("three_threads")
def test_heads_are_shared_between_threads(built: Kernels) -> None:
    assert torch.get_num_threads() == 3
    for heads in (8, 2), (37, 1):
        assert_equals_definition(built.level.name, [(1, 9), (5, 20), (20, 50), (1, 200)], heads=heads, head_dim=128)


def test_many_heads_fit_on_thread_stack(built: Kernels) -> None:
    assert_equals_definition(built.level.name, [(1, 3)], heads=(1100, 1), head_dim=1024)


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


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton exists for Linux only")
@pytest.mark.parametrize(
    ("num_independent", "num_programs", "expected"),
    [(1, 1, 1), (8, 264, 64), (16, 264, 32), (264, 264, 1), (1, 999, 64)],
)
def test_num_splits_for_batch_shape(num_independent: int, num_programs: int, expected: int) -> None:
    from torchrelay.engine.kernels.triton.attention import num_splits_for

    assert num_splits_for(num_independent, num_programs) == expected


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton exists for Linux only")
@pytest.mark.parametrize("family", ["gemma2"])
def test_decoder_with_triton_attention_is_exact(model_of: ModelOf, family: str) -> None:
    """Greedy output equals transformers', with prompts in chunks beside decodes: windows, caps, odd head sizes."""
    model, backends = model_of(family), backends_for(DEVICE, "triton")
    instance = model.instance(token_budget=20, page_tokens=8, backends=backends, device=str(DEVICE))
    assert_batch_is_exact(model, instance, (1, 9, 31), num_tokens=4)


def test_unknown_backend_raises_key_error() -> None:
    with pytest.raises(KeyError):
        attention_backend("none")
