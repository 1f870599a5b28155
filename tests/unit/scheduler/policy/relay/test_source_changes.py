"""Which sources joined between two records of a copy, and which were dropped."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import a_copy, a_model
from torchrelay.scheduler.policy.relay.source_changes import sources_dropped, sources_joined
from torchrelay.scheduler.policy.types import PackCopy, SourceShare

MODEL = a_model()


def copy_with(num_verified: int, *shares: SourceShare) -> PackCopy:
    return replace(a_copy(MODEL, num_verified), shares=shares)


def test_joined_and_dropped_sources() -> None:
    before = copy_with(1, SourceShare("a", 1, 1.0, True), SourceShare("b", 1, 1.0, False, "slow"))
    after = copy_with(
        2,
        SourceShare("a", 1, 0.0, False, "gone"),
        SourceShare("b", 1, 1.0, True, "slow"),
        SourceShare("c", 0, 0.0, True),
    )
    assert sources_joined(before, after) == ("b", "c") and sources_dropped(before, after) == {"a": "gone"}
    assert sources_joined(None, before) == () and sources_dropped(None, before) == {"b": "slow"}
