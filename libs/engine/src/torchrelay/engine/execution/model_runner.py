"""Computes batches layer by layer; samples their tokens and pools their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrelay.engine import profile
from torchrelay.engine.batching.layerwise import plans_within_budget
from torchrelay.engine.batching.sequences import BatchPlan, SequenceGroup
from torchrelay.engine.core import Embedding, NewToken, PromptLogprobs
from torchrelay.engine.device_counts import DECODE_STEPS
from torchrelay.engine.execution.resident_model import ResidentModel
from torchrelay.engine.kv.export import KvExport
from torchrelay.engine.model.batch import Batch
from torchrelay.engine.model.pooling import pool
from torchrelay.engine.profile import Activity
from torchrelay.engine.sampling.prompt_scores import score
from torchrelay.engine.sampling.sampler import draws_of, num_rows_at_once, sample_tokens


@dataclass(slots=True)
class BatchResult:
    """The outputs of a batch."""

    tokens: list[NewToken] = field(default_factory=list)
    embeddings: list[Embedding] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


class ModelRunner:
    """Runs plans through the layers. Time counts as ``COMPUTE`` until tokens are sampled, then as ``SCHEDULING``.

    ``interrupt`` is called before each call of layers; it may end groups, and tells whether it has.
    """

    def __init__(self, model: ResidentModel, export: KvExport, interrupt: Callable[[], bool]) -> None:
        self._transformer, self._graphs, self._lay_out = model.transformer, model.graphs, model.lay_out
        self._hidden_states, self._device = model.hidden_states, model.device
        self._num_layers = model.config.num_layers
        self._num_scored_at_once = num_rows_at_once(model.device, model.config.vocab_size)
        self._export = export
        self._interrupt = interrupt

    def run(self, plan: BatchPlan) -> tuple[BatchPlan, BatchResult]:
        """Computes a plan from its layer boundary to its outputs; returns the part of it that was left, and its result.

        Raises ``LoadFailed``.
        """
        profile.enter(Activity.COMPUTE)
        result = BatchResult()
        left, logits = self._outputs(plan, result)
        self._export.finish()  # blocks leave while the device computes the layers after them
        result.tokens = self._sample(left, logits)
        return left, result

    def run_one_layer(self, groups: Sequence[SequenceGroup], token_budget: int) -> None:
        """Computes one layer of groups that run layer by layer and are at the same boundary."""
        profile.enter(Activity.COMPUTE)
        layer = groups[0].layer
        for plan in plans_within_budget(groups, token_budget):
            plan, _ = plan.live_part()
            if not plan:
                continue
            batch = self._lay_out(plan)
            hidden, batch = self.run_layers(layer, layer + 1, self._hidden(batch), batch)
            row = 0
            for chunk in batch.plan.chunks:
                self._hidden_states.write(chunk.context, chunk.begin, hidden[row : row + chunk.num_tokens])
                row += chunk.num_tokens
        self._export.finish()
        for group in groups:
            group.layer += 1

    def _outputs(self, plan: BatchPlan, result: BatchResult) -> tuple[BatchPlan, Tensor]:
        """Runs a plan through all layers above its boundary; returns the part of it that was left, and the logits of
        its tokens. Adds everything but the tokens to ``result``.
        """
        if self._interrupt():
            plan, _ = plan.live_part()
        if not plan:
            return plan, torch.empty(0)
        batch = self._lay_out(plan)
        replayed = None if self._graphs is None else self._graphs.run(batch)
        if plan.decoding:
            DECODE_STEPS["eager" if replayed is None else "replayed"] += 1
        if replayed is not None:
            return plan, replayed
        hidden, batch = self.run_layers(plan.layer, self._num_layers, self._hidden(batch), batch)
        if batch.num_outputs:
            hidden, batch = self._live_part(hidden, batch)
        result.prompt_logprobs += (
            score(chunk, hidden[rows], self._transformer.logits, self._num_scored_at_once)
            for chunk, rows in batch.plan.scored
        )
        if not batch.num_outputs:
            return batch.plan, hidden[:0]
        ends = hidden if batch.output_rows is None else hidden[batch.output_rows]
        pooled = tuple(batch.plan.pooled)
        if not pooled:
            return batch.plan, self._transformer.logits(ends)
        result.embeddings += (
            pool(context.group.spec, context.num_cached, hidden[rows], self._transformer.final_norm)
            for _, rows, context in pooled
        )
        are_pooled = {output for output, _, _ in pooled}
        others = [output for output in range(len(ends)) if output not in are_pooled]
        return batch.plan, self._transformer.logits(ends[others]) if others else ends[:0]

    def run_layers(self, begin: int, end: int, hidden: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Runs layers [begin, end) of a batch, [rows, hidden] to the same; hands over finished KV blocks.

        Sequences that end meanwhile leave the batch before the next layers.
        """
        while begin < end:
            hidden, batch = self._live_part(hidden, batch)
            if not batch.plan:
                break
            until = min(end, begin + self._export.layers_at_once(batch.handed_over))
            hidden, reached = self._transformer.run_layers(begin, until, hidden, batch)
            self._export.hand_over(batch.handed_over, range(begin, reached))
            begin = reached
        return hidden, batch

    def _live_part(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """The part of a batch that has not ended."""
        if batch.plan and self._interrupt():
            plan, rows = batch.plan.live_part()
            hidden, batch = hidden[rows], self._lay_out(plan) if plan else _empty_batch(batch, plan)
        return hidden, batch

    def _hidden(self, batch: Batch) -> Tensor:
        plan = batch.plan
        if not plan.layer:
            return self._transformer.embed(batch)
        return torch.cat([self._hidden_states.of(chunk.context)[chunk.begin : chunk.end] for chunk in plan.chunks])

    def _sample(self, plan: BatchPlan, logits: Tensor) -> list[NewToken]:
        if self._device.type == "cuda":  # otherwise its time would count for the next activity
            # Waits for the stream, not the device: layers may still be being copied.
            torch.cuda.current_stream(self._device).synchronize()
        profile.enter(Activity.SCHEDULING)
        return sample_tokens(logits, draws_of(plan))


def _empty_batch(batch: Batch, plan: BatchPlan) -> Batch:
    """A batch that every sequence has left."""
    empty = batch.token_ids[:0]
    return Batch(plan, empty, empty, batch.views, 0)
