"""Triton's attention, in its interpreter (on a GPU with ``TRITON_INTERPRET=0``), against the reference backend."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.harness import ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kernels.attention import AttentionBackend, Scoring, Span
from torchrelay.engine.kernels.backends import backends_for
from torchrelay.engine.kernels.gather_attention import GatherAttention
from torchrelay.engine.kernels.triton.attention import TritonAttention, num_splits_for

DEVICE = torch.device("cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu")
PAGE = 4
SAMPLING = SamplingParams(temperature=0, max_tokens=4)


def assert_alike(
    shapes: Sequence[tuple[int, int]],
    window: int | None = None,
    cap: float | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> None:
    """(rows, positions) per sequence, in scattered pages; unwritten slots are NaN."""
    num_heads, num_kv_heads = heads
    random = np.random.default_rng(1)
    torch.manual_seed(1)
    num_pages = sum(-(-num_positions // PAGE) for _, num_positions in shapes) + 2
    free = random.permutation(num_pages)
    kv = torch.full((2, num_pages * PAGE, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    spans, row = [], 0
    for num_rows, num_positions in shapes:
        pages, free = free[: -(-num_positions // PAGE)], free[-(-num_positions // PAGE) :]
        slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:num_positions].astype(np.int64)
        kv[:, slots] = torch.randn(2, num_positions, num_kv_heads, head_dim).to(dtype)
        spans.append(Span(row, num_rows, slots))
        row += num_rows
    queries = torch.randn(row, num_heads, head_dim).to(dtype)
    scoring = Scoring(head_dim**-0.5, cap)
    backends: list[AttentionBackend] = [GatherAttention(), TritonAttention(PAGE)]
    expected, actual = (
        backend.attend(queries.to(DEVICE), kv.to(DEVICE), backend.plan(spans, window, dtype, DEVICE), scoring)
        for backend in backends
    )
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((1, 1), 24), ((3, 3), 8), ((8, 2), 64), ((5, 1), 24), ((40, 2), 8)], ids=str
)
def test_head_counts_and_sizes(heads: tuple[int, int], head_dim: int) -> None:
    assert_alike([(1, 7), (1, 90), (9, 20)], heads=heads, head_dim=head_dim)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (None, 0.7), (1, None), (5, 0.7), (33, 0.7), (1000, None)])
def test_windows_and_caps(window: int | None, cap: float | None) -> None:
    assert_alike([(1, 1), (1, 6), (1, 70), (5, 5), (33, 80), (1, 2)], window, cap)


@pytest.mark.parametrize("num_rows", [2, 127, 128, 129, 200])
@pytest.mark.parametrize("window", [None, 40])
def test_prompts_longer_than_tile(num_rows: int, window: int | None) -> None:
    assert_alike([(num_rows, num_rows + 37), (3, 3)], window, heads=(2, 1), head_dim=64)


@pytest.mark.parametrize("num_positions", [1, 3, 4, 5, 127, 128, 129, 700])
def test_single_sequence_lengths(num_positions: int) -> None:
    assert_alike([(1, num_positions)], heads=(2, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_dtypes(dtype: torch.dtype) -> None:
    assert_alike([(1, 1), (1, 90), (40, 60)], cap=5.0, dtype=dtype, tolerance=0.02)


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
    shapes: list[tuple[int, int]], window: int | None, cap: float | None, heads: tuple[int, int]
) -> None:
    assert_alike(shapes, window, cap, heads)


@pytest.mark.parametrize(
    ("num_independent", "num_programs", "expected"),
    [(1, 1, 1), (8, 264, 64), (16, 264, 32), (264, 264, 1), (1, 999, 64)],
)
def test_num_splits_for_batch_shape(num_independent: int, num_programs: int, expected: int) -> None:
    assert num_splits_for(num_independent, num_programs) == expected


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_decoder_with_triton_attention_is_exact(model_of: ModelOf, family: str) -> None:
    """Greedy output equals transformers', with prompts in chunks beside decodes: windows, caps, odd head sizes."""
    model = model_of(family)
    instance = model.instance(
        token_budget=20, page_tokens=8, backends=backends_for(DEVICE, "triton"), device=str(DEVICE)
    )
    expected = {}
    for number, length in enumerate((1, 9, 31)):
        prompt = prompt_of(length)
        expected[f"{number}/0", 0] = model.expected(prompt, SAMPLING.max_tokens)
        instance.prefill(group_of(prompt, f"{number}/0", SAMPLING))
    assert outputs(run(instance)) == expected
    assert_idle(instance)
