"""Packs by their last use, as many as are remembered, and what copies of them are worth."""

from __future__ import annotations

from itertools import pairwise

from tests.unit.scheduler.policy.paper_cluster import a_model
from torchrelay.scheduler.policy.replication.pack_worth import PackWorth
from torchrelay.scheduler.policy.replication.replication_state import PackWorths, RecentPacks


def test_longest_unused_pack_is_forgotten_first() -> None:
    recent_packs, models = RecentPacks(max_packs=2), [a_model(f"m{number}") for number in range(3)]
    for now, model in enumerate((models[0], models[1], models[0])):
        recent_packs.note(model, float(now))
    assert recent_packs.use(models[1].pack_id).model is models[1]
    recent_packs.note(models[2], 3.0)
    assert models[1].pack_id not in recent_packs
    assert {use.model.name: use.last_used for use in recent_packs} == {"m0": 2.0, "m2": 3.0}
    recent_packs.forget(models[0].pack_id)
    assert [use.model for use in recent_packs] == [models[2]]


def test_worths_expire_at_different_times() -> None:
    worths, worked_out = PackWorths(), dict[str, list[int]]()
    for now in range(20):
        for pack_id in map(str, range(16)):

            def work_out(pack_id: str = pack_id, now: int = now) -> PackWorth:
                worked_out.setdefault(pack_id, []).append(now)
                return PackWorth(in_ram=now)

            assert worths.of(pack_id, now, work_out).in_ram == worked_out[pack_id][-1]
    for moments in worked_out.values():
        assert len(moments) >= 4 and all(2 <= later - earlier <= 6 for earlier, later in pairwise(moments))
    assert len({tuple(moments) for moments in worked_out.values()}) > 4
