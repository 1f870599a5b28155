"""Attention that reads the pages in place for sequences of one row and short prompts; others use the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrelay.engine.kernels.attention import AttentionBackend, Scoring, Span, visible_span
from torchrelay.engine.kernels.cpu.library import DTYPES, Kernels, address, kernels
from torchrelay.engine.kernels.gather_attention import GatherAttention, GatherPart

# Rows times positions of a prompt: beyond this torch is quicker.
MAX_PRODUCTS: Final = 4096


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A batch.

    ``table`` has a column for each row computed here: its index, the address of its slots, and their number.
    """

    num_rows: int
    table: npt.NDArray[np.int64]  # [3, rows]
    addresses: tuple[int, int, int]  # of the table's rows
    slots: Sequence[npt.NDArray[np.int64]]  # kept alive, because the table points to them
    parts: Sequence[GatherPart]


class CpuAttention(AttentionBackend):
    """Attention by ``kernels``. Softmax and sums are fp32; keys and values are read once, in place.

    Prompts with more than ``max_products`` products of rows and positions are left to the reference.
    """

    def __init__(self, page_tokens: int = 1, library: Kernels | None = None, max_products: int = MAX_PRODUCTS) -> None:
        super().__init__(page_tokens)
        library = library or kernels()
        assert library is not None, "registered only where kernels were built"
        self._kernels: Kernels = library
        self._max_products = max_products
        self._gather = GatherAttention(page_tokens)

    def plan(self, spans: Sequence[Span], window: int | None, dtype: torch.dtype, device: torch.device) -> CpuPlan:
        singles = [visible_span(span, window) for span in spans if span.num_rows == 1]
        several = [span for span in spans if span.num_rows > 1]
        short = [span for span in several if span.num_rows * len(span.slots) <= self._max_products]
        long = [span for span in several if span.num_rows * len(span.slots) > self._max_products]
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
    """A column for each row: it sees one position more than the row before, within the window."""
    number = np.arange(span.num_rows)
    end = len(span.slots) - span.num_rows + 1 + number
    begin = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
    places = span.slots.ctypes.data + begin * span.slots.itemsize
    return np.stack([span.first_row + number, places, end - begin], axis=1)
