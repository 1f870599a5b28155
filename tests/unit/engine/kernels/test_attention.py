from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from torchrelay.engine.kernels.attention import Scoring, Span
from torchrelay.engine.kernels.backends import ATTENTION_BACKENDS, attention_backend

HEADS, KV_HEADS, DIM = 6, 2, 8
PLAIN, CAPPED = Scoring(DIM**-0.5), Scoring(0.2, cap=1.5)


def reference(
    queries: torch.Tensor, kv: torch.Tensor, spans: Sequence[Span], window: int | None, scoring: Scoring
) -> torch.Tensor:
    """Attention computed row by row and head by head."""
    out = torch.empty(len(queries), HEADS, DIM)
    for span in spans:
        for row in range(span.num_rows):
            visible = span.slots[: len(span.slots) - span.num_rows + 1 + row][-(window or 1000) :]
            for head in range(HEADS):
                keys, values = kv[:, visible, head // (HEADS // KV_HEADS)]
                scores = keys @ queries[span.first_row + row, head] * scoring.scale
                if scoring.cap:
                    scores = scoring.cap * (scores / scoring.cap).tanh()
                out[span.first_row + row, head] = scores.softmax(0) @ values
    return out.flatten(1)


@pytest.mark.parametrize("name", ATTENTION_BACKENDS)
@pytest.mark.parametrize(
    ("window", "scoring"),
    [(None, PLAIN), (1, PLAIN), (40, PLAIN), (None, CAPPED), (6, CAPPED)],
    ids=["plain", "1-plain", "40-plain", "capped", "6-capped"],
)
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1)],
        [(1, 30)],
        [(1, 3), (1, 9), (1, 9), (1, 40), (1, 300)],
        [(12, 12)],
        [(5, 33)],
        [(1, 4), (1, 6), (7, 7), (1, 20), (3, 50)],
    ],
)
def test_attention_equals_definition(
    name: str, scoring: Scoring, window: int | None, shapes: list[tuple[int, int]]
) -> None:
    """(rows, positions) per sequence. Unused slots hold NaN, as another model's bytes may: they must not be read."""
    random = np.random.default_rng(0)
    free = random.permutation(800)
    kv = torch.full((2, 800, KV_HEADS, DIM), torch.nan)
    spans, row = [], 0
    for num_rows, num_positions in shapes:
        slots, free = free[:num_positions], free[num_positions:]
        kv[:, slots] = torch.randn(2, num_positions, KV_HEADS, DIM)
        spans.append(Span(row, num_rows, slots.astype(np.int64)))
        row += num_rows
    queries = torch.randn(row, HEADS, DIM)
    backend = attention_backend(name)(1)
    plan = backend.plan(spans, window, torch.float32, torch.device("cpu"))
    actual = backend.attend(queries, kv, plan, scoring)
    assert torch.allclose(actual, reference(queries, kv, spans, window, scoring), atol=1e-5)


def test_unknown_backend_raises_key_error() -> None:
    with pytest.raises(KeyError):
        attention_backend("none")
