"""Packs by their last use, as many as are remembered."""

from __future__ import annotations

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.replication.replication_state import RecentPacks


def test_the_longest_unused_pack_is_forgotten_first_and_reading_is_no_use() -> None:
    recent_packs, models = RecentPacks(max_packs=2), [a_model(f"m{number}") for number in range(3)]
    for now, model in enumerate((models[0], models[1], models[0])):
        recent_packs.note(model, float(now))
    assert recent_packs.use(models[1].pack_id).model is models[1]
    recent_packs.note(models[2], 3.0)
    assert models[1].pack_id not in recent_packs
    assert {use.model.name: use.last_used for use in recent_packs} == {"m0": 2.0, "m2": 3.0}
    recent_packs.forget(models[0].pack_id)
    assert [use.model for use in recent_packs] == [models[2]]
