"""Sizes of slots: counted as workers and stores come, change and go."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.scheduler.policy.paper_cluster import MB, a_store, a_worker
from torchrelay.scheduler.policy.cluster.slot_sizes import SlotSize, SlotSizes
from torchrelay.scheduler.policy.types import OWN_ENGINE, Role, SlotClass

ONE = SlotClass(1, OWN_ENGINE)
SMALL, LARGE = SlotSize(ONE, 100 * MB, 64 * MB), SlotSize(ONE, 200 * MB, 64 * MB)


def test_size_is_present_until_its_last_slot_goes() -> None:
    sizes = SlotSizes()
    sizes.store(a_store("s", "host-1", arena_bytes=100 * MB))
    sizes.worker(a_worker("a"))
    sizes.worker(a_worker("b"))
    sizes.worker_gone("a", now=10.0)
    assert sizes.present(SlotClass(1)) == [SMALL] and sizes.since(0.0, SlotClass(1)) == [SMALL]
    sizes.worker_gone("b", now=20.0)
    assert sizes.present(SlotClass(1)) == [] and sizes.largest_weights_bytes == 0
    assert sizes.since(20.0, SlotClass(1)) == [SMALL] and sizes.since(20.1, SlotClass(1)) == []
    sizes.worker(a_worker("a", seen_at=30.0))
    assert sizes.since(30.0, SlotClass(1)) == [SMALL]


def test_arena_counts_for_slots_of_its_host() -> None:
    sizes = SlotSizes()
    sizes.worker(a_worker("a"))
    sizes.worker(a_worker("elsewhere", "host-2", num_devices=4))
    assert sizes.largest_weights_bytes == 0
    store = a_store("s", "host-1", arena_bytes=100 * MB)
    sizes.store(store)
    sizes.store(replace(store, arena_target_bytes=200 * MB, seen_at=5.0))
    assert sizes.present(SlotClass(1)) == [LARGE] and sizes.since(5.0, SlotClass(1)) == [LARGE, SMALL]
    sizes.store_gone("host-1", now=9.0)
    assert sizes.largest_weights_bytes == 0 and LARGE in sizes.since(9.0, SlotClass(1))
    assert sizes.present(SlotClass(4)) == [SlotSize(SlotClass(4, OWN_ENGINE), 0, 64 * MB)]


def test_worker_without_decode_has_no_pool() -> None:
    sizes = SlotSizes()
    sizes.worker(a_worker("a", playable_roles=frozenset((Role.PREFILL,))))
    assert sizes.present(SlotClass(1)) == [SlotSize(ONE, 0, 0)]


def test_sizes_are_those_of_a_model_s_engine() -> None:
    sizes = SlotSizes()
    sizes.worker(a_worker("a"))
    assert sizes.present(SlotClass(1, "vllm")) == []
    sizes.worker(a_worker("b", engine="vllm"))
    assert len(sizes.present(SlotClass(1))) == 2
    assert sizes.present(SlotClass(1, "vllm")) == [SlotSize(SlotClass(1, "vllm"), 0, 64 * MB)]
