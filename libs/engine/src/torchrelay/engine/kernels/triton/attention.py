"""Attention over paged KV by Triton: flash decoding for sequences with one row, tiled prefill for the others.

For tests on a CPU it runs in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrelay.engine.kernels.attention import AttentionBackend, Scoring, Span
from torchrelay.engine.kernels.triton import attention_kernels as kernels
from torchrelay.engine.kernels.triton.attention_kernels import SHEET_HEADER

_UNBOUNDED: Final = 1 << 30  # positions
_MAX_SPLITS: Final = 64
_PROGRAMS_PER_PROCESSOR: Final = 2
_INTERPRETED_PROGRAMS: Final = 4
_MIN_DOT: Final = 16  # least rows and columns of a matrix unit
_PREFILL_TILE_BYTES: Final = 32 << 10  # of queries; keys and values take twice as much in addition
_DECODE_TILE_BYTES: Final = 16 << 10  # of keys
# Iterations in flight: page tables are read before the keys and values they point to.
_DECODE_STAGES: Final = 5
_PREFILL_STAGES: Final = 3


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Sequences of several rows each; ``attention_kernels`` describes the sheet."""

    sheet: Tensor
    nums_rows: tuple[int, ...]  # of each sequence
    _blocks: dict[int, Tensor] = field(default_factory=dict)  # the same for all layers

    def blocks(self, block_rows: int) -> Tensor:
        """The rows in blocks of at most ``block_rows``: sequence and first row, int32 [blocks, 2].

        The last rows come first, because they see most and take longest.
        """
        if block_rows not in self._blocks:
            pairs = [(number, row) for number, rows in enumerate(self.nums_rows) for row in range(0, rows, block_rows)]
            self._blocks[block_rows] = _to_device(np.asarray(pairs[::-1], np.int32), self.sheet.device)
        return self._blocks[block_rows]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The inputs of the kernels: a sheet of the sequences with one row, and a sheet of the others."""

    window: int
    decode: Tensor | None
    prefill: PrefillPart | None = None


@dataclass(frozen=True, slots=True)
class FixedPlan(PagedPlan):
    """A plan of sequences of one row each that is refilled for each batch, and with ``blank`` beyond the batch."""

    blank: Tensor = field(kw_only=True)  # int32 [sequences, 4]: sequences that see the scratch slot alone


class TritonAttention(AttentionBackend):
    """Attention that reads page tables; one instance per model."""

    replays = True

    def plan(self, spans: Sequence[Span], window: int | None, dtype: torch.dtype, device: torch.device) -> PagedPlan:
        single = [span for span in spans if span.num_rows == 1]
        several = [span for span in spans if span.num_rows > 1]
        prefill = None
        if several:
            prefill = PrefillPart(self._sheet(several, device), tuple(span.num_rows for span in several))
        decode = self._sheet(single, device) if single else None
        return PagedPlan(_UNBOUNDED if window is None else window, decode, prefill)

    def attend(self, queries: Tensor, kv: Tensor, plan: PagedPlan, scoring: Scoring) -> Tensor:
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        if plan.decode is not None:
            self._decode(queries, kv, plan.decode, plan.window, scoring, out)
        if plan.prefill is not None:
            self._prefill(queries, kv, plan.prefill, plan.window, scoring, out)
        return out.flatten(1)

    def fixed_plan(
        self, num_rows: int, max_positions: int, window: int | None, scratch_slot: int, device: torch.device
    ) -> FixedPlan:
        width = SHEET_HEADER + _padded(-(-max_positions // self.page_tokens))
        sheet = torch.zeros(num_rows, width, dtype=torch.int32)
        sheet[:, 0] = torch.arange(num_rows)
        sheet[:, 1:SHEET_HEADER] = 1
        sheet[:, SHEET_HEADER] = scratch_slot // self.page_tokens
        blank = sheet[:, : SHEET_HEADER + 1].clone()
        return FixedPlan(_UNBOUNDED if window is None else window, sheet.to(device), blank=blank.to(device))

    def refill(self, fixed: FixedPlan, plan: PagedPlan) -> None:
        assert fixed.decode is not None and plan.decode is not None and plan.prefill is None
        num_rows, width = plan.decode.shape
        fixed.decode[:num_rows, :width].copy_(plan.decode)
        fixed.decode[num_rows:, : fixed.blank.shape[1]].copy_(fixed.blank[num_rows:])

    def _sheet(self, spans: Sequence[Span], device: torch.device) -> Tensor:
        tables = [span.slots[:: self.page_tokens] for span in spans]
        sheet = np.zeros((len(spans), SHEET_HEADER + _padded(max(map(len, tables)))), np.int32)
        sheet[:, 0] = [span.first_row for span in spans]
        sheet[:, 1] = [span.num_rows for span in spans]
        sheet[:, 2] = [len(span.slots) for span in spans]
        for row, table in zip(sheet, tables, strict=True):
            row[SHEET_HEADER : SHEET_HEADER + len(table)] = table // self.page_tokens
        return _to_device(sheet, device)

    def _decode(self, queries: Tensor, kv: Tensor, sheet: Tensor, window: int, scoring: Scoring, out: Tensor) -> None:
        (num_heads, head_dim), num_kv_heads, num_sequences = queries.shape[1:], kv.shape[2], len(sheet)
        num_splits = num_splits_for(num_sequences * num_kv_heads, _num_programs(queries.device))
        partial = queries.new_empty(num_sequences, num_heads, num_splits, head_dim, dtype=torch.float32)
        weights = queries.new_empty(num_sequences, num_heads, num_splits, dtype=torch.float32)
        block_dim, group = triton.next_power_of_2(max(head_dim, _MIN_DOT)), num_heads // num_kv_heads
        kernels.decode_split[(num_sequences, num_kv_heads, num_splits)](
            queries,
            kv,
            sheet,
            partial,
            weights,
            scoring.scale,
            scoring.cap or 1.0,
            window,
            sheet.stride(0),
            kv.stride(0),
            num_splits,
            KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            PAGE=self.page_tokens,
            CAPPED=scoring.cap is not None,
            MULTIPLIED=_product_dtype(kv),
            BLOCK_HEADS=triton.next_power_of_2(max(group, _MIN_DOT)),
            BLOCK_DIM=block_dim,
            BLOCK_KV=_rows_in(_DECODE_TILE_BYTES, block_dim * kv.element_size()),
            num_warps=4,
            num_stages=_DECODE_STAGES,
        )
        kernels.decode_merge[(num_sequences, num_heads)](
            partial,
            weights,
            sheet,
            out,
            sheet.stride(0),
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            SPLITS=num_splits,
            BLOCK_DIM=block_dim,
            num_warps=2,
        )

    def _prefill(
        self, queries: Tensor, kv: Tensor, part: PrefillPart, window: int, scoring: Scoring, out: Tensor
    ) -> None:
        (num_heads, head_dim), num_kv_heads = queries.shape[1:], kv.shape[2]
        block_dim = triton.next_power_of_2(max(head_dim, _MIN_DOT))
        block_rows = _rows_in(_PREFILL_TILE_BYTES, block_dim * kv.element_size())
        blocks = part.blocks(block_rows)
        kernels.prefill[(len(blocks), num_heads)](
            queries,
            kv,
            part.sheet,
            blocks,
            out,
            scoring.scale,
            scoring.cap or 1.0,
            window,
            part.sheet.stride(0),
            kv.stride(0),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PAGE=self.page_tokens,
            CAPPED=scoring.cap is not None,
            MULTIPLIED=_product_dtype(kv),
            BLOCK_ROWS=block_rows,
            BLOCK_DIM=block_dim,
            BLOCK_KV=max(block_rows // 2, _MIN_DOT),
            num_warps=8 if block_rows >= 128 else 4,
            num_stages=_PREFILL_STAGES,
        )


def num_splits_for(num_independent: int, num_programs: int) -> int:
    """The number of parts to split a sequence's positions into: a power of two that keeps ``num_programs`` busy.

    Depends on the shape of the batch, never on lengths: a recorded batch is replayed with other lengths.
    """
    wanted: int = triton.next_power_of_2(-(-num_programs // num_independent))
    return min(wanted, _MAX_SPLITS)


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _product_dtype(kv: Tensor) -> Any:
    """The dtype of products: the KV's, except that the interpreter has no bf16 matrix product."""
    if kv.dtype == torch.bfloat16 and kv.is_cuda:
        return tl.bfloat16
    return tl.float16 if kv.dtype == torch.float16 else tl.float32


def _rows_in(tile_bytes: int, row_bytes: int) -> int:
    """Rows of a tile in shared memory: 16 to 128, a power of two because ``row_bytes`` is one."""
    return min(max(tile_bytes // row_bytes, _MIN_DOT), 128)


def _padded(num_pages: int) -> int:
    """A width rounded up to a step, so that kernels are not specialised for each width."""
    return -(-(num_pages + SHEET_HEADER) // 16) * 16 - SHEET_HEADER


def _to_device(numbers: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    moved = torch.from_numpy(numbers)
    return moved if device.type == "cpu" else moved.pin_memory().to(device, non_blocking=True)
