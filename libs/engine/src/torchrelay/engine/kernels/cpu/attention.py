"""Attention straight over the pages, of sequences with a row each and of short prompts; of others by the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrelay.engine.kernels.attention import (
    AttentionBackend,
    GatherAttention,
    GatherPart,
    Scoring,
    Span,
    visible_span,
)
from torchrelay.engine.kernels.cpu.library import DTYPES, Kernels, address, kernels

# Of a prompt: more products of rows and positions are quicker where torch computes them.
MAX_PRODUCTS: Final = 4096


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """``table`` has a column for each row computed here: which, where its slots lie in memory, how many these are."""

    num_rows: int
    table: npt.NDArray[np.int64]  # [3, rows]
    addresses: tuple[int, int, int]  # of the table's rows
    slots: Sequence[npt.NDArray[np.int64]]  # what it points into
    parts: Sequence[GatherPart]


class CpuAttention(AttentionBackend):
    """Only where there are ``kernels``. Softmax and sums in fp32, keys and values read once where they lie."""

    def __init__(self, page_tokens: int = 1) -> None:
        super().__init__(page_tokens)
        found = kernels()
        assert found is not None, "asked for only where they are"
        self._kernels: Kernels = found
        self._gather = GatherAttention(page_tokens)

    def plan(self, spans: Sequence[Span], window: int | None, dtype: torch.dtype, device: torch.device) -> CpuPlan:
        singles = [visible_span(span, window) for span in spans if span.num_rows == 1]
        several = [span for span in spans if span.num_rows > 1]
        short = [span for span in several if span.num_rows * len(span.slots) <= MAX_PRODUCTS]
        long = [span for span in several if span.num_rows * len(span.slots) > MAX_PRODUCTS]
        numbers = [(span.first_row, span.slots.ctypes.data, len(span.slots)) for span in singles]
        of_rows = np.asarray(numbers, np.int64).reshape(-1, 3)
        if short:
            of_rows = np.concatenate([of_rows, *(_each_row(span, window) for span in short)])
        table = of_rows.T.copy()
        begin, size = table.ctypes.data, table.nbytes // len(table)
        addresses = begin, begin + size, begin + 2 * size
        parts = self._gather.plan(long, window, dtype, device) if long else ()
        return CpuPlan(len(of_rows), table, addresses, [span.slots for span in (*singles, *short)], parts)

    def attend(self, queries: Tensor, kv: Tensor, plan: CpuPlan, scoring: Scoring) -> Tensor:
        num_rows, num_heads, head_dim = queries.shape
        queries = queries.contiguous()
        out = queries.new_empty(num_rows, num_heads * head_dim)
        self._gather.attend_parts(queries, kv, plan.parts, scoring, out)
        self._kernels.attend(
            DTYPES[queries.dtype],
            address(queries),
            address(kv),
            kv.stride(0),
            *plan.addresses,
            plan.num_rows,
            num_heads,
            kv.shape[2],
            head_dim,
            scoring.scale,
            scoring.cap or 0.0,
            address(out),
        )
        return out


def _each_row(span: Span, window: int | None) -> npt.NDArray[np.int64]:
    """Of each of its rows, which sees one position more than the one before, within the window."""
    number = np.arange(span.num_rows)
    end = len(span.slots) - span.num_rows + 1 + number
    begin = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
    places = span.slots.ctypes.data + begin * span.slots.itemsize
    return np.stack([span.first_row + number, places, end - begin], axis=1)
