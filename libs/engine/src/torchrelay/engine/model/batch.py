"""The tensors of a batch plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrelay.engine.batching.sequences import BatchPlan, PrefillChunk
from torchrelay.engine.kernels.attention import AttentionBackend, Span
from torchrelay.engine.kernels.layer import LayerView
from torchrelay.engine.kernels.low_rank import AdaptedRows, Adapter
from torchrelay.engine.model.rope import Rope
from torchrelay.modelspec.config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The attention window (None: unlimited) and the rotation that layers of one kind share."""

    window: int | None
    rope: Rope


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch whose rows are positions: one per running choice, then the positions of each chunk."""

    plan: BatchPlan
    token_ids: Tensor  # int64 [rows]
    write_slots: Tensor  # int64 [rows]: the slot of each row's keys and values
    views: tuple[LayerView, ...]  # by kind of layer
    num_outputs: int  # rows with logits: running choices, and the last row of each chunk that ends its context
    output_rows: Tensor | None = None  # int64: their indices; None: all rows
    adapted: AdaptedRows | None = None  # None: no row has an adapter

    @property
    def handed_over(self) -> Sequence[PrefillChunk]:
        return [chunk for chunk in self.plan.chunks if chunk.context.group.on_kv is not None]


def layer_kinds(config: ModelConfig, device: torch.device) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of a model's layers, and the index of each layer's kind. An encoder's have none: they view no pages."""
    if config.rope is None:
        return (), ()
    rope = Rope(config.rope, config.head_dim, device)
    local = rope if config.local_rope is None else Rope(config.local_rope, config.head_dim, device)
    still = Rope(RopeConfig(theta=1.0, linear_factor=math.inf), config.head_dim, device)  # cosines 1, sines 0
    traits = [(window, layer in config.unrotated_layers) for layer, window in enumerate(config.windows)]
    distinct = tuple(dict.fromkeys(traits))
    kinds = tuple(
        LayerKind(window, still if is_unrotated else rope if window is None else local)
        for window, is_unrotated in distinct
    )
    return kinds, tuple(distinct.index(each) for each in traits)


def make_batch(
    plan: BatchPlan, kinds: Sequence[LayerKind], backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Batch:
    """Lays out a plan as tensors; ``dtype`` is the model's."""
    token_ids = [each.output[-1] for each in plan.decoding]
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
    views = tuple(
        LayerView(*kind.rope.angles(numbers[1], dtype), backend.plan(spans, kind.window, dtype, device))
        for kind in kinds
    )
    is_every_row = len(output_rows) == len(token_ids)
    return Batch(
        plan=plan,
        token_ids=numbers[0],
        write_slots=numbers[2],
        views=views,
        num_outputs=len(output_rows),
        output_rows=None if is_every_row else torch.tensor(output_rows, dtype=torch.int64, device=device),
        adapted=_adapted(plan, device),
    )


def _adapted(plan: BatchPlan, device: torch.device) -> AdaptedRows | None:
    sizes = [(each.spec, 1) for each in plan.decoding]
    sizes += [(chunk.context.group.spec, chunk.num_tokens) for chunk in plan.chunks]
    rows: dict[Adapter, list[int]] = {}
    begin = 0
    for spec, size in sizes:
        if spec.adapter is not None:
            assert isinstance(spec.adapter, Adapter), "the instance has read it"
            rows.setdefault(spec.adapter, []).extend(range(begin, begin + size))
        begin += size
    return AdaptedRows(tuple(rows.items()), begin, device) if rows else None
