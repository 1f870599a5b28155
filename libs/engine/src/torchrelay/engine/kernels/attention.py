"""Attention over paged KV: the base of all backends, their registry, and the reference.

A backend is asked twice: ``plan`` once per batch with what every sequence reads, ``attend`` once per layer. Other
backends are registered by the path of their class and imported when first asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from torchrelay.engine import profile
from torchrelay.engine.kernels.cpu.library import kernels
from torchrelay.engine.profile import Activity

BACKENDS: Final = {
    "cpu": "torchrelay.engine.kernels.cpu.attention:CpuAttention",
    "gather": "torchrelay.engine.kernels.attention:GatherAttention",
    "triton": "torchrelay.engine.kernels.triton.attention:TritonAttention",
}
_MIN_TIMED_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a batch, its last positions: row i of n sees all slots but the last n - 1 - i."""

    first_row: int
    num_rows: int
    slots: npt.NDArray[np.int64]  # of every position of the sequence, those of these rows included


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores are query times key times ``scale``, squeezed into (-cap, cap) by a tanh where there is a cap."""

    scale: float
    cap: float | None = None


class AttentionBackend(ABC):
    """``page_tokens``: slots come in runs of so many, each from a multiple of it on."""

    replays: ClassVar[bool] = False  # whether it has plans that stay at their addresses

    def __init__(self, page_tokens: int = 1) -> None:
        self.page_tokens = page_tokens

    @abstractmethod
    def plan(self, spans: Sequence[Span], window: int | None, dtype: torch.dtype, device: torch.device) -> Any:
        """What ``attend`` needs for this batch; the same for all layers of one window.

        ``spans`` cover all rows, in order. With a ``window`` a row sees that many positions, its own the last of them.
        """

    @abstractmethod
    def attend(self, queries: Tensor, kv: Tensor, plan: Any, scoring: Scoring) -> Tensor:
        """[rows, heads, head_dim] over one layer's [2, slots, kv_heads, head_dim]; gives [rows, heads * head_dim]."""

    def fixed_plan(
        self, num_rows: int, max_positions: int, window: int | None, scratch_slot: int, device: torch.device
    ) -> Any:
        """A plan of ``num_rows`` sequences with a row each, for computations that are replayed at the same addresses.

        At first each sees the scratch slot alone. Only for a backend that ``replays``, as is ``refill``.
        """
        raise TypeError(f"{type(self).__name__} has no plans that stay")

    def refill(self, fixed: Any, plan: Any) -> None:
        """Puts a plan of at most as many sequences with a row each, and nothing else, into one by ``fixed_plan``."""
        raise TypeError(f"{type(self).__name__} has no plans that stay")


def attention_backend(name: str, page_tokens: int = 1) -> AttentionBackend:
    """A new backend by its registered name. Raises ``KeyError``."""
    module, _, cls = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), cls)(page_tokens)
    return backend


def default_backend(device: torch.device) -> str:
    """The name of the backend that computes quickest on a device."""
    if device.type == "cuda":
        return "triton"
    return "gather" if kernels() is None else "cpu"


@dataclass(frozen=True, slots=True)
class GatherPart:
    """Rows that one call computes: several sequences with a row each (padded to equal length), or one with several."""

    rows: slice
    num_sequences: int
    slots: Tensor  # [sequences * padded length]
    mask: Tensor | None  # additive
    is_causal: bool


class GatherAttention(AttentionBackend):
    """Copies each sequence's keys and values together and runs torch's SDPA, whose CPU kernel has an fp32 softmax."""

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
        """``attend`` for the rows of these parts, into ``out``."""
        for part in parts:
            out[part.rows] = _attend_part(queries[part.rows], kv, part, scoring)


def _attend_part(queries: Tensor, kv: Tensor, part: GatherPart, scoring: Scoring) -> Tensor:
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = kv.shape[2]
    # Of short contexts it takes a few microseconds, as telling the time does.
    is_notable = len(part.slots) >= _MIN_TIMED_POSITIONS
    before = profile.enter(Activity.MEMORY) if is_notable else Activity.COMPUTE
    keys, values = (
        plane.index_select(0, part.slots).view(part.num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2)
        for plane in kv
    )
    if is_notable:
        profile.enter(before)
    if part.num_sequences == num_rows:
        # The query heads that share a kv head stand where SDPA has query positions: nothing is repeated.
        grouped = queries.view(num_rows, num_kv_heads, -1, head_dim)
        out = _attention(grouped, keys, values, part, scoring)
        return out.reshape(num_rows, num_heads * head_dim)
    # One sequence: kv heads stand where SDPA has the batch, and sharing is a stride of zero.
    grouped = queries.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = (each.transpose(0, 1).expand(-1, grouped.shape[1], -1, -1) for each in (keys, values))
    out = _attention(grouped, keys, values, part, scoring)
    return out.permute(2, 0, 1, 3).reshape(num_rows, num_heads * head_dim)


def _attention(queries: Tensor, keys: Tensor, values: Tensor, part: GatherPart, scoring: Scoring) -> Tensor:
    if scoring.cap is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=part.mask, is_causal=part.is_causal, scale=scoring.scale
        )
    # torch's kernels know no cap.
    scores = (queries @ keys.transpose(-1, -2)) * scoring.scale
    scores = torch.tanh(scores / scoring.cap) * scoring.cap
    if part.is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    elif part.mask is not None:
        scores = scores + part.mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def visible_span(span: Span, window: int | None) -> Span:
    """The span without the positions that none of its rows sees."""
    if window is None:
        return span
    return Span(span.first_row, span.num_rows, span.slots[-(window + span.num_rows - 1) :])


def _runs_of_similar_length(spans: Sequence[Span]) -> list[list[Span]]:
    """Neighbours whose padding to equal length at most doubles the work; the batch comes sorted by length."""
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
        slots[row, lengths[row] :] = span.slots[0]  # masked, but it must be a slot this sequence has written
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
        age = torch.arange(span.num_rows)[:, None] + before - torch.arange(num_slots)  # of each slot, seen by each row
        mask = torch.zeros(age.shape, dtype=dtype).masked_fill_((age < 0) | (age >= window), -torch.inf)
    elif before:
        mask = torch.full((span.num_rows, num_slots), -torch.inf, dtype=dtype).triu_(before + 1)
    return GatherPart(rows, 1, torch.from_numpy(span.slots), mask, is_causal=mask is None)


def _to_device(part: GatherPart, device: torch.device) -> GatherPart:
    mask = None if part.mask is None else part.mask.to(device)
    return GatherPart(part.rows, part.num_sequences, part.slots.to(device), mask, part.is_causal)
