"""Planning of prompts that run layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torchrelay.engine.batching.sequences import BatchPlan, PrefillChunk, SequenceGroup


def runnable_groups(
    groups: Sequence[SequenceGroup],
    token_budget: int,
    num_free_positions: int,
    is_ready: Callable[[int], bool],
) -> tuple[SequenceGroup, ...]:
    """The earliest group that can continue, and others at its boundary that fit into the same batch.

    ``is_ready`` tells whether the weights of a layer have arrived. Groups that have not begun must fit into the
    positions for whose hidden states there is memory. An instance that is still loading computes with the layers that
    it has and never waits for a layer (live execution, after BlitzScale, OSDI 2025).
    """
    runnable: list[SequenceGroup] = []
    num_left = token_budget
    for group in groups:
        if not is_ready(group.layer) or (runnable and group.layer != runnable[0].layer):
            continue
        size = sum(context.num_tokens for context in group.contexts)
        if not group.layer and size > num_free_positions:
            continue
        if runnable and size > num_left:
            break
        runnable.append(group)
        num_left -= size
        num_free_positions -= 0 if group.layer else size
    return tuple(runnable)


def plans_within_budget(groups: Sequence[SequenceGroup], token_budget: int) -> Iterator[BatchPlan]:
    """All positions of all contexts, in batches within the budget."""
    chunks: list[PrefillChunk] = []
    num_left = token_budget
    for context in [context for group in groups for context in group.contexts]:
        begin = 0
        while begin < context.num_tokens:
            end = min(begin + num_left, context.num_tokens)
            chunks.append(PrefillChunk(context, begin, end))
            num_left -= end - begin
            begin = end
            if not num_left:
                yield BatchPlan((), tuple(chunks), context.group.layer)
                chunks, num_left = [], token_budget
    if chunks:
        yield BatchPlan((), tuple(chunks), chunks[0].context.group.layer)
