"""Retained packs: what is evicted, in which order, for how long; and an arena where nothing may be evicted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.transfer.arena.arena_packs import CAPACITY, pack, reserve
from torchrelay.common.errors import Overloaded
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.arena.slab import Slab
from torchrelay.transfer.errors import ArenaFull


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena.create(tmp_path / "arena", CAPACITY)
    yield arena
    arena.check_integrity()
    arena.close(unlink=True)


def three(arena: Arena) -> list[str]:
    """Packs of 20 of the 64 pages each, in the order of their use."""
    return [reserve(arena, 20, seed).pack_id for seed in (1, 2, 3)]


def one_more(arena: Arena, seed: int, num_pages: int = 20, keep_retained: bool = False) -> Slab:
    return arena.reserve(pack(num_pages, seed)[1].encode(), keep_retained=keep_retained)


def left_after(arena: Arena, seed: int, keep_retained: bool = False) -> set[str]:
    """Which earlier packs are still there after one more."""
    come = one_more(arena, seed, keep_retained=keep_retained)
    return there(arena) - {come.pack_id}


def there(arena: Arena) -> set[str]:
    return {slab.pack_id for slab in arena.slabs()}


def test_retained_packs_stay_while_others_can_be_evicted(arena: Arena) -> None:
    first, second, third = three(arena)
    arena.retention.renew([first, second], 60)
    fourth = one_more(arena, 4).pack_id
    assert there(arena) == {first, second, fourth}  # the third, though used last, was evicted
    assert third not in there(arena)


def test_retained_packs_are_evicted_last_in_their_own_order(arena: Arena) -> None:
    first, second, third = three(arena)
    arena.retention.renew([second, third, first], 60)
    fourth = one_more(arena, 4).pack_id
    assert there(arena) == {first, third, fourth}
    arena.retention.renew([third, first, fourth], 60)
    assert left_after(arena, 5) == {first, fourth}


def test_relay_keeping_retained_packs_gets_full_arena(arena: Arena) -> None:
    packs = three(arena)
    arena.retention.renew(packs, 60)
    with pytest.raises(ArenaFull, match="pinned or retained") as refused:
        one_more(arena, 4, keep_retained=True)
    assert isinstance(refused.value, Overloaded) and refused.value.retry_after_s > 0
    assert there(arena) == set(packs)
    assert one_more(arena, 4, num_pages=4, keep_retained=True).num_slab_bytes


def test_pack_no_longer_retained_evicted(arena: Arena) -> None:
    first, second, third = three(arena)
    arena.retention.renew([first, second, third], 60)
    arena.retention.renew([first, third], 60)
    assert left_after(arena, 4, keep_retained=True) == {first, third}


def test_retention_ends_with_its_lease(arena: Arena) -> None:
    packs = three(arena)
    arena.retention.renew(packs, 0)
    assert not arena.retention.ranks
    one_more(arena, 4, keep_retained=True)
    assert packs[0] not in there(arena)


def test_pack_named_before_arrival_is_retained(arena: Arena) -> None:
    coming = reserve(arena, 20, 9).pack_id
    arena.retention.renew([coming], 60)
    assert arena.drop(coming), "the scheduler's own word goes before its guard"
    packs = [reserve(arena, 20, seed).pack_id for seed in (9, 1, 2)]
    assert packs[0] == coming
    assert left_after(arena, 3) == {packs[0], packs[2]}


def test_pinned_packs_are_never_evicted_retained_or_not(arena: Arena) -> None:
    packs = three(arena)
    for pack_id in packs:
        arena.pin(pack_id, "worker")
    arena.retention.renew(packs[:1], 60)
    for keep in (False, True):
        with pytest.raises(ArenaFull, match="are pinned"):
            one_more(arena, 4, keep_retained=keep)
    assert there(arena) == set(packs)
    arena.unpin(packs[0], "worker")
    with pytest.raises(ArenaFull):
        one_more(arena, 4, keep_retained=True)
    assert left_after(arena, 4) == set(packs[1:])
