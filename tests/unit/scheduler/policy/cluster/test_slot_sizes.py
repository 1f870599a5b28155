"""Sizes of slots: counted as workers and stores come, change and go."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import MB, a_store, a_worker
from torchrelay.scheduler.policy.cluster.slot_sizes import SlotSize, SlotSizes
from torchrelay.scheduler.policy.types import Role

SMALL, LARGE = SlotSize(1, 100 * MB, 64 * MB), SlotSize(1, 200 * MB, 64 * MB)


def test_size_is_present_until_its_last_slot_goes() -> None:
    sizes = SlotSizes()
    sizes.store(a_store("s", "host-1", arena_bytes=100 * MB))
    sizes.worker(a_worker("a"))
    sizes.worker(a_worker("b"))
    sizes.worker_gone("a", now=10.0)
    assert sizes.present(1) == [SMALL] and sizes.since(0.0, 1) == [SMALL]
    sizes.worker_gone("b", now=20.0)
    assert sizes.present(1) == [] and sizes.largest_weights_bytes == 0
    assert sizes.since(20.0, 1) == [SMALL] and sizes.since(20.1, 1) == []
    sizes.worker(a_worker("a", seen_at=30.0))
    assert sizes.since(30.0, 1) == [SMALL]


def test_arena_counts_for_slots_of_its_host() -> None:
    sizes = SlotSizes()
    sizes.worker(a_worker("a"))
    sizes.worker(a_worker("elsewhere", "host-2", num_devices=4))
    assert sizes.largest_weights_bytes == 0
    store = a_store("s", "host-1", arena_bytes=100 * MB)
    sizes.store(store)
    sizes.store(replace(store, arena_target_bytes=200 * MB, seen_at=5.0))
    assert sizes.present(1) == [LARGE] and sizes.since(5.0, 1) == [LARGE, SMALL]
    sizes.store_gone("host-1", now=9.0)
    assert sizes.largest_weights_bytes == 0 and LARGE in sizes.since(9.0, 1)
    assert sizes.present(4) == [SlotSize(4, 0, 64 * MB)]


def test_worker_without_decode_has_no_pool() -> None:
    sizes = SlotSizes()
    sizes.worker(a_worker("a", playable_roles=frozenset((Role.PREFILL,))))
    assert sizes.present(1) == [SlotSize(1, 0, 0)]
