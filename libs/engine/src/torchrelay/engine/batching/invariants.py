"""Invariants between any two steps, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from torchrelay.common.fair_queue import FairQueue
from torchrelay.engine.batching.pages import PageAllocator
from torchrelay.engine.batching.sequences import DecodeSequence, GroupState, PrefillContext, SequenceGroup


def check_pages(allocator: PageAllocator, groups: Collection[SequenceGroup], held: Mapping[str, int]) -> None:
    """Checks that each page is free or in the table of a live sequence, and counted for its tenant.

    Raises ``AssertionError``.
    """
    tables = [table for group in groups for context in group.contexts for table in context.tables]
    allocator.check_integrity(tables + [decoding.table for group in groups for decoding in group.decodings])
    counted: Counter[str] = Counter()
    for group in groups:
        counted[group.spec.tenant_id] += group.num_pages
        assert bool(group.num_pages) == (group.state is not GroupState.WAITING), (
            "a waiting group has pages, or another has none"
        )
    assert +counted == held, "pages are counted for the wrong tenant"


def check_states(
    groups: Collection[SequenceGroup],
    waiting: FairQueue[SequenceGroup],
    prefilling: FairQueue[PrefillContext],
    by_layer: Collection[SequenceGroup],
    decoding: Collection[DecodeSequence],
) -> None:
    """Checks that each group is in the queue of its state, and in no other. Raises ``AssertionError``."""
    waiting.check_integrity()
    prefilling.check_integrity()
    assert all(group.contexts or group.decodings for group in groups), "a group outlives its choices"
    assert set(decoding) == {each for group in groups for each in group.decodings}, "a choice decodes without a group"
    queued = [group for group in groups if group.state is GroupState.WAITING]
    assert len(queued) == len(waiting) and all((each.spec.tenant_id, each) in waiting for each in queued)
    running = [group for group in groups if group.state is GroupState.RUNNING]
    chunked = [context for group in running if not group.by_layer for context in group.contexts]
    assert len(chunked) == len(prefilling), "a context is missing from the prefill queue"
    assert all((each.group.spec.tenant_id, each) in prefilling for each in chunked)
    assert set(by_layer) == {group for group in running if group.by_layer and group.contexts}
