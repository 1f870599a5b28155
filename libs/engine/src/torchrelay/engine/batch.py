"""A plan as tensors: what the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrelay.engine.attention import AttentionBackend, Span
from torchrelay.engine.rope import Rope
from torchrelay.engine.sequences import Chunk, Plan


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows are positions: one per running choice, then those of each chunk."""

    plan: Plan
    token_ids: Tensor  # int64 [rows]
    write_slots: Tensor  # int64 [rows]: where each row's keys and values go
    cos: Tensor  # [rows, 1, head_dim / 2]
    sin: Tensor
    attention: Any  # the backend's own plan
    output_rows: Tensor  # int64: the running choices', and the last of each chunk that ends its context

    @property
    def handed_over(self) -> Sequence[Chunk]:
        return [chunk for chunk in self.plan.chunks if chunk.context.group.on_kv is not None]


def make_batch(plan: Plan, rope: Rope, backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> Batch:
    """Lays a plan out; ``dtype`` is the model's."""
    token_ids = [each.last_token for each in plan.decoding]
    positions = [each.num_computed for each in plan.decoding]
    write_slots = [int(each.slots[each.num_computed]) for each in plan.decoding]
    spans = [Span(row, 1, each.slots[: each.num_computed + 1]) for row, each in enumerate(plan.decoding)]
    output_rows = list(range(len(plan.decoding)))
    for chunk in plan.chunks:
        context = chunk.context
        spans.append(Span(len(token_ids), chunk.num_tokens, context.slots[: chunk.end]))
        token_ids += context.tokens[chunk.begin : chunk.end]
        positions += range(chunk.begin, chunk.end)
        write_slots += context.slots[chunk.begin : chunk.end].tolist()
        if chunk.ends_context:
            output_rows.append(len(token_ids) - 1)
    numbers = torch.from_numpy(np.asarray([token_ids, positions, write_slots], np.int64)).to(device)
    cos, sin = rope.angles(numbers[1], dtype)
    return Batch(
        plan=plan,
        token_ids=numbers[0],
        write_slots=numbers[2],
        cos=cos,
        sin=sin,
        attention=backend.plan(spans, dtype, device),
        output_rows=torch.tensor(output_rows, dtype=torch.int64, device=device),
    )
