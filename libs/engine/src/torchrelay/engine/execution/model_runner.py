"""Computes batches layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Final

import torch
from torch import Tensor

from torchrelay.engine import profile
from torchrelay.engine.batching.sequences import BatchPlan, PrefillChunk, PrefillContext, SequenceGroup
from torchrelay.engine.execution.decode_graphs import DecodeGraphs
from torchrelay.engine.kv.layout import KvBlock, KvLayout
from torchrelay.engine.kv.pool import PagedKv
from torchrelay.engine.kv.prefill_layout import PrefillLayout
from torchrelay.engine.model.batch import Batch
from torchrelay.engine.model.decoder import Decoder
from torchrelay.engine.profile import Activity

# Of KV that leaves at once. Each time wakes threads of both workers, on a CPU at the cost of those that compute: of a
# prompt whose KV is 128 KB a layer, prefill took 210 ms a layer at a time, 189 when the KV of six layers left at once.
MIN_HANDOVER_BYTES: Final = 1 << 20


class ModelRunner:
    """What a step computes with. ``lay_out`` makes a batch of a plan, ``kv_layout`` is how a group's KV is handed over.

    ``settle`` is called with each segment of the weights before it is computed with: it waits until the segment is
    there, or groups have ended, and tells whether they have.
    """

    def __init__(
        self,
        decoder: Decoder,
        pages: PagedKv,
        lay_out: Callable[[BatchPlan], Batch],
        wait_for_segment: Callable[[int], bool],
        kv_layout: Callable[[SequenceGroup], KvLayout],
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._pages = pages
        self._num_layers = pages.kv.shape[0]
        self._token_bytes = pages.kv[0, :, 0].nbytes  # of one layer
        self._lay_out = lay_out
        self._wait_for_segment = wait_for_segment
        self._kv_layout = kv_layout
        self._graphs = graphs

    def close(self) -> None:
        """Lets go of what it has recorded."""
        if self._graphs is not None:
            self._graphs.close()

    def run(self, plan: BatchPlan) -> tuple[BatchPlan, Tensor]:
        """A plan through all layers from its boundary on: what is left of it, and the logits it gives."""
        while plan and self._wait_for_segment(_first_segment(plan)):
            plan, _ = plan.live_part()
        if not plan:
            return plan, torch.empty(0)
        batch = self._lay_out(plan)
        if self._graphs is not None and (replayed := self._graphs.run(batch)) is not None:
            return plan, replayed
        hidden, batch = self.run_layers(plan.layer, self._num_layers, self._hidden(batch), batch)
        if batch.num_outputs:
            hidden, batch = self._await_segment(self._num_layers + 1, hidden, batch)
        if batch.num_outputs and plan.layer:  # it began above the embeddings, and the head may be tied to them
            hidden, batch = self._await_segment(0, hidden, batch)
        if not batch.num_outputs:
            return batch.plan, hidden[:0]
        ends = hidden if batch.output_rows is None else hidden[batch.output_rows]
        return batch.plan, self._decoder.logits(ends)

    def run_layers(self, begin: int, end: int, hidden: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Layers [begin, end) of a batch, [rows, hidden] to the same; hands over the layers' finished KV blocks.

        What ends meanwhile, or while a layer's weights are waited for, leaves the batch before the next layers.
        """
        while begin < end:
            hidden, batch = self._await_segment(begin + 1, hidden, batch)
            if not batch.plan:
                break
            until = min(end, begin + self._layers_at_once(batch.handed_over))
            hidden, reached = self._decoder.run_layers(begin, until, hidden, batch)
            self._hand_over(batch.handed_over, range(begin, reached))
            begin = reached
        return hidden, batch

    def _await_segment(self, segment: int, hidden: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """What is left of a batch once a segment is there; it stops waiting when nothing is."""
        while batch.plan and self._wait_for_segment(segment):
            plan, rows = batch.plan.live_part()
            hidden, batch = hidden[rows], self._lay_out(plan) if plan else _empty_batch(batch, plan)
        return hidden, batch

    def run_one_layer(self, groups: Sequence[SequenceGroup], token_budget: int) -> None:
        """One layer of groups that run layer by layer and are at the same boundary."""
        layer = groups[0].layer
        for plan in _plans_within_budget(groups, token_budget):
            plan, _ = plan.live_part()
            if not plan:
                continue
            batch = self._lay_out(plan)
            hidden, batch = self.run_layers(layer, layer + 1, self._hidden(batch), batch)
            row = 0
            for chunk in batch.plan.chunks:
                context, rows = chunk.context, hidden[row : row + chunk.num_tokens]
                if context.hidden is None:
                    context.hidden = torch.empty(
                        context.num_tokens, *rows.shape[1:], dtype=rows.dtype, device=rows.device
                    )
                context.hidden[chunk.begin : chunk.end] = rows
                row += chunk.num_tokens
        for group in groups:
            group.layer += 1

    def end(self, contexts: Sequence[PrefillContext]) -> Tensor:
        """Logits after contexts that have run layer by layer to the end."""
        return self._decoder.logits(torch.stack([_hidden_of(context)[-1] for context in contexts]))

    def copy_out(self, layer: int, context: PrefillContext, begin: int, end: int) -> memoryview:
        """KV of positions [begin, end) of one layer, as a chunk on the road."""
        slots = torch.from_numpy(context.slots[begin:end]).to(self._pages.kv.device)
        return as_bytes(self._pages.kv[layer].index_select(1, slots))

    def copy_prefill(self, group: SequenceGroup, layout: PrefillLayout) -> tuple[memoryview, ...]:
        """All that was computed of a group at its layer boundary, chunk by chunk."""
        places = [layout.locate(index) for index in range(layout.num_chunks)]
        return tuple(
            as_bytes(_hidden_of(group.contexts[place.sequence])[place.token_begin : place.token_end])
            if layout.holds_hidden(place)
            else self.copy_out(place.layer, group.contexts[place.sequence], place.token_begin, place.token_end)
            for place in places
        )

    def _hidden(self, batch: Batch) -> Tensor:
        plan = batch.plan
        if not plan.layer:
            return self._decoder.embed(batch.token_ids)
        return torch.cat([_hidden_of(chunk.context)[chunk.begin : chunk.end] for chunk in plan.chunks])

    def _layers_at_once(self, handed_over: Sequence[PrefillChunk]) -> int:
        """How many layers are computed before their KV leaves, which it then does while the next are computed."""
        layer_bytes = sum(chunk.end - chunk.new_from for chunk in handed_over) * self._token_bytes
        return max(1, MIN_HANDOVER_BYTES // layer_bytes) if layer_bytes else self._num_layers

    def _hand_over(self, chunks: Sequence[PrefillChunk], layers: Sequence[int]) -> None:
        if not chunks:
            return
        before = profile.enter(Activity.KV_TRANSFER)
        for layer, chunk in product(layers, chunks):
            self._hand_over_chunk(chunk, layer)
        profile.enter(before)

    def _hand_over_chunk(self, chunk: PrefillChunk, layer: int) -> None:
        context, group = chunk.context, chunk.context.group
        assert group.on_kv is not None, "only such chunks are handed over"
        layout = self._kv_layout(group)
        for block in range(chunk.new_from // layout.block_tokens, layout.num_blocks(context.sequence)):
            index = layout.index_of(context.sequence, block, layer)
            place = layout.locate(index)
            if place.token_end > chunk.end:
                break
            if index in group.handed_over:  # before it was set back, or by the instance that passed it on
                continue
            group.handed_over.add(index)
            data = self.copy_out(layer, context, place.token_begin, place.token_end)
            group.on_kv(KvBlock(group.spec.group_id, index, data))


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes on the host; on a CPU without a copy when it is contiguous."""
    data: memoryview = tensor.contiguous().view(torch.uint8).cpu().numpy().reshape(-1).data
    return data


def runnable_groups(
    groups: Sequence[SequenceGroup], num_layers: int, token_budget: int, is_ready: Callable[[int], bool]
) -> tuple[SequenceGroup, ...]:
    """Of groups that run layer by layer: the earliest that can go on, and with it others at its boundary as far as
    they fit into one batch. ``is_ready`` tells whether a layer's weights are there; the head counts as the last.

    So an instance that is still loading works on what it has, and never waits (live pairing after BlitzScale, OSDI
    2025: the earliest batch whose next layer is present).
    """
    found: list[SequenceGroup] = []
    room = token_budget
    for group in groups:
        stops = group.layer == group.until and group.layer < num_layers  # until it is passed on
        if stops or not is_ready(group.layer) or (found and group.layer != found[0].layer):
            continue
        size = sum(context.num_tokens for context in group.contexts)
        if found and size > room:
            break
        found.append(group)
        room -= size
    return tuple(found)


def _plans_within_budget(groups: Sequence[SequenceGroup], token_budget: int) -> Iterator[BatchPlan]:
    """All positions of all contexts, in batches within the budget."""
    chunks: list[PrefillChunk] = []
    room = token_budget
    for context in [context for group in groups for context in group.contexts]:
        begin = 0
        while begin < context.num_tokens:
            end = min(begin + room, context.num_tokens)
            chunks.append(PrefillChunk(context, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield BatchPlan((), tuple(chunks), context.group.layer)
                chunks, room = [], token_budget
    if chunks:
        yield BatchPlan((), tuple(chunks), chunks[0].context.group.layer)


def _first_segment(plan: BatchPlan) -> int:
    """The embeddings, or the layer above the plan's boundary."""
    return plan.layer + 1 if plan.layer else 0


def _hidden_of(context: PrefillContext) -> Tensor:
    assert context.hidden is not None, "beyond boundary 0 there are hidden states"
    return context.hidden


def _empty_batch(batch: Batch, plan: BatchPlan) -> Batch:
    """A batch that everything has left."""
    empty = batch.token_ids[:0]
    return Batch(plan, empty, empty, batch.views, 0)
