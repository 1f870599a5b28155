"""Outcomes of commands that change nothing; the others are tested with what they change."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_store, a_worker
from torchrelay.scheduler.policy.inputs import (
    CommandEnded,
    CommandId,
    CommandOutcome,
    Copy,
    Load,
    Retention,
    RoleChange,
    Unload,
)

GONE = [Load("gone"), Load("gone", "s1"), RoleChange("gone"), Unload("gone")]


@pytest.mark.parametrize("command", [*GONE, Copy("unknown", "s1")], ids=str)
@pytest.mark.parametrize("outcome", CommandOutcome)
def test_late_outcome_has_no_effect(command: CommandId, outcome: CommandOutcome) -> None:
    scene = PaperCluster().settle(a_store("s1", "h1"), a_worker("w", "h1"))
    assert not scene.policy.apply(CommandEnded(command, outcome, "too late"), scene.now)


@pytest.mark.parametrize("outcome", CommandOutcome)
def test_answered_retention_is_no_event(outcome: CommandOutcome) -> None:
    scene = PaperCluster().settle(a_store("s1", "h1"), a_worker("w", "h1"))
    assert not scene.policy.apply(CommandEnded(Retention("s1"), outcome, "no"), scene.now)
