"""Attention of sequences with a row each straight over the pages; prompts as the reference has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrelay.engine.attention import AttentionBackend, GatherAttention, GatherPart, Scoring, Span, seen
from torchrelay.engine.cpu.kernels import DTYPES, Kernels, address, kernels


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """``singles`` have a row each. ``table``: which, where their slots lie in memory, how many these are."""

    singles: Sequence[Span]
    table: npt.NDArray[np.int64]  # [3, singles]
    addresses: tuple[int, int, int]  # of the table's rows
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
        singles = [seen(span, window) for span in spans if span.num_rows == 1]
        others = [span for span in spans if span.num_rows > 1]
        numbers = [(span.first_row, span.slots.ctypes.data, len(span.slots)) for span in singles]
        table = np.asarray(numbers, np.int64).reshape(-1, 3).T.copy()
        rows, slots, lengths = (row.ctypes.data for row in table)
        return CpuPlan(singles, table, (rows, slots, lengths), self._gather.plan(others, window, dtype, device))

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
            len(plan.singles),
            num_heads,
            kv.shape[2],
            head_dim,
            scoring.scale,
            scoring.cap or 0.0,
            address(out),
        )
        return out
