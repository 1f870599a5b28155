"""Attention over paged KV: the interface of its backends.

``plan`` runs once per batch with what every sequence reads, ``attend`` once per layer. To add a backend, write a module
beside this one and name it in ``kernels.backends``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a batch: its last positions. Row i of n sees all slots except the last n - 1 - i."""

    first_row: int
    num_rows: int
    slots: npt.NDArray[np.int64]  # of all positions of the sequence, these rows included


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores are query times key times ``scale``, and with ``cap`` limited to (-cap, cap) by a tanh."""

    scale: float
    cap: float | None = None


class AttentionBackend(ABC):
    """Attention on one kind of device. Slots come in aligned runs of ``page_tokens``."""

    replays: ClassVar[bool] = False  # whether it implements ``fixed_plan`` and ``refill``

    def __init__(self, page_tokens: int = 1) -> None:
        self.page_tokens = page_tokens

    @abstractmethod
    def plan(self, spans: Sequence[Span], window: int | None, dtype: torch.dtype, device: torch.device) -> Any:
        """The data that ``attend`` needs for this batch in all layers with this window.

        ``spans`` cover all rows, in order. With a ``window`` a row sees that many positions, which end with its own.
        """

    @abstractmethod
    def attend(self, queries: Tensor, kv: Tensor, plan: Any, scoring: Scoring) -> Tensor:
        """[rows, heads, head_dim] over one layer's [2, slots, kv_heads, head_dim] -> [rows, heads * head_dim]."""

    def fixed_plan(
        self, num_rows: int, max_positions: int, window: int | None, scratch_slot: int, device: torch.device
    ) -> Any:
        """A plan of ``num_rows`` sequences of one row each whose tensors keep their addresses, for recorded steps.

        Each sees the scratch slot alone until ``refill``.
        """
        raise TypeError(f"{type(self).__name__} has no plans with fixed addresses")

    def refill(self, fixed: Any, plan: Any) -> None:
        """Copies a plan of at most as many sequences of one row each into a plan by ``fixed_plan``."""
        raise TypeError(f"{type(self).__name__} has no plans with fixed addresses")


def visible_span(span: Span, window: int | None) -> Span:
    """The span without the positions that no row of it sees."""
    if window is None:
        return span
    return Span(span.first_row, span.num_rows, span.slots[-(window + span.num_rows - 1) :])
