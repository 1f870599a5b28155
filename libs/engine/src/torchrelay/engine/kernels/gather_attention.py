"""The reference attention backend: gathers keys and values from their pages and runs torch's SDPA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine import profile
from torchrelay.engine.kernels.attention import AttentionBackend, Scoring, Span, visible_span
from torchrelay.engine.profile import Activity

_MIN_TIMED_POSITIONS: Final = 512


@dataclass(frozen=True, slots=True)
class GatherPart:
    """The rows of one call: several sequences of one row each, padded to equal length, or one of several rows."""

    rows: slice
    num_sequences: int
    slots: Tensor  # [sequences * padded length]
    mask: Tensor | None  # additive
    is_causal: bool


class GatherAttention(AttentionBackend):
    """Gathers each sequence's keys and values. SDPA's CPU kernel computes the softmax in fp32."""

    def plan(
        self, spans: Sequence[Span], window: int | None, dtype: torch.dtype, device: torch.device
    ) -> list[GatherPart]:
        spans = [visible_span(span, window) for span in spans]
        single = [span for span in spans if span.num_rows == 1]
        parts = [_decode_part(run, dtype) for run in _runs_of_similar_length(single)]
        parts += [_prefill_part(span, window, dtype) for span in spans if span.num_rows > 1]
        if device.type == "cpu":
            return parts
        return [_to_device(part, device) for part in parts]

    def attend(self, queries: Tensor, kv: Tensor, plan: list[GatherPart], scoring: Scoring) -> Tensor:
        if len(plan) == 1:
            return _attend_part(queries, kv, plan[0], scoring)
        out = torch.empty_like(queries).flatten(1)
        self.attend_parts(queries, kv, plan, scoring, out)
        return out

    def attend_parts(
        self, queries: Tensor, kv: Tensor, parts: Sequence[GatherPart], scoring: Scoring, out: Tensor
    ) -> None:
        """Computes the rows of these parts like ``attend``, into ``out``."""
        for part in parts:
            out[part.rows] = _attend_part(queries[part.rows], kv, part, scoring)


def _attend_part(queries: Tensor, kv: Tensor, part: GatherPart, scoring: Scoring) -> Tensor:
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = kv.shape[2]
    # The gathering of short contexts takes a few microseconds, as long as reading the clock.
    is_notable = len(part.slots) >= _MIN_TIMED_POSITIONS
    before = profile.enter(Activity.MEMORY) if is_notable else Activity.COMPUTE
    keys, values = (
        plane.index_select(0, part.slots).view(part.num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2)
        for plane in kv
    )
    if is_notable:
        profile.enter(before)
    if part.num_sequences == num_rows:
        # The query heads of a kv head take the place of SDPA's query positions: no key is repeated.
        grouped = queries.view(num_rows, num_kv_heads, -1, head_dim)
        out = _attention(grouped, keys, values, part, scoring)
        return out.reshape(num_rows, num_heads * head_dim)
    # A single sequence: kv heads take the place of SDPA's batch, and a stride of zero shares them.
    grouped = queries.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = (each.transpose(0, 1).expand(-1, grouped.shape[1], -1, -1) for each in (keys, values))
    out = _attention(grouped, keys, values, part, scoring)
    return out.permute(2, 0, 1, 3).reshape(num_rows, num_heads * head_dim)


def _attention(queries: Tensor, keys: Tensor, values: Tensor, part: GatherPart, scoring: Scoring) -> Tensor:
    if scoring.cap is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=part.mask, is_causal=part.is_causal, scale=scoring.scale
        )
    # torch's kernels have no cap.
    scores = (queries @ keys.transpose(-1, -2)) * scoring.scale
    scores = torch.tanh(scores / scoring.cap) * scoring.cap
    if part.is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    elif part.mask is not None:
        scores = scores + part.mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def _runs_of_similar_length(spans: Sequence[Span]) -> list[list[Span]]:
    """Adjacent spans whose padding to equal length at most doubles the work; the batch is sorted by length."""
    runs: list[list[Span]] = []
    for span in spans:
        follows = bool(runs) and span.first_row == runs[-1][-1].first_row + 1
        if follows and len(span.slots) <= 2 * len(runs[-1][0].slots) + 64:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _decode_part(run: Sequence[Span], dtype: torch.dtype) -> GatherPart:
    lengths = [len(span.slots) for span in run]
    longest = max(lengths)
    slots = np.empty((len(run), longest), np.int64)
    for row, span in enumerate(run):
        slots[row, : lengths[row]] = span.slots
        slots[row, lengths[row] :] = span.slots[0]  # masked, but it must be a slot that this sequence has written
    mask = None
    if min(lengths) < longest:
        beyond = torch.arange(longest) >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(len(run), longest, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None]
    rows = slice(run[0].first_row, run[0].first_row + len(run))
    return GatherPart(rows, len(run), torch.from_numpy(slots.reshape(-1)), mask, is_causal=False)


def _prefill_part(span: Span, window: int | None, dtype: torch.dtype) -> GatherPart:
    rows = slice(span.first_row, span.first_row + span.num_rows)
    num_slots = len(span.slots)
    before = num_slots - span.num_rows
    mask = None
    if window is not None and num_slots > window:
        age = torch.arange(span.num_rows)[:, None] + before - torch.arange(num_slots)  # [rows, slots]
        mask = torch.zeros(age.shape, dtype=dtype).masked_fill_((age < 0) | (age >= window), -torch.inf)
    elif before:
        mask = torch.full((span.num_rows, num_slots), -torch.inf, dtype=dtype).triu_(before + 1)
    return GatherPart(rows, 1, torch.from_numpy(span.slots), mask, is_causal=mask is None)


def _to_device(part: GatherPart, device: torch.device) -> GatherPart:
    mask = None if part.mask is None else part.mask.to(device)
    return GatherPart(part.rows, part.num_sequences, part.slots.to(device), mask, part.is_causal)
