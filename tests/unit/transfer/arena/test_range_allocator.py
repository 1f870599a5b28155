"""First fit, growing before evicting; eviction takes the least recently used, and no more than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.transfer.arena.range_allocator import Allocation, UsedRange, find_space, first_fit


def used(begin: int, end: int, last_used: int = 0, pinned: bool = False) -> UsedRange:
    return UsedRange(f"pack-{begin}", begin, end, last_used, pinned)


def test_first_fit_takes_lowest_sufficient_hole() -> None:
    taken = [used(50, 60), used(0, 10), used(14, 20)]
    assert first_fit(taken, 0, 100, 4) == 10
    assert first_fit(taken, 0, 100, 5) == 20
    assert first_fit(taken, 0, 100, 31) == 60
    assert first_fit(taken, 0, 100, 41) is None


def test_growing_comes_before_evicting() -> None:
    assert find_space([used(0, 10)], 0, faulted_end=10, end=20, num_bytes=10) == Allocation(10, ())


def test_least_recently_used_evicted_only_if_in_range() -> None:
    taken = [used(0, 5, last_used=1), used(5, 15, last_used=2), used(15, 20, last_used=3)]
    assert find_space(taken, 0, 20, 20, 5) == Allocation(0, ("pack-0",))
    # pack-0 is evicted first but frees too little; then pack-5, and both ranges together suffice.
    assert find_space(taken, 0, 20, 20, 15) == Allocation(0, ("pack-0", "pack-5"))
    apart = [used(0, 5, last_used=1), used(5, 10, last_used=9, pinned=True), used(10, 20, last_used=2)]
    assert find_space(apart, 0, 20, 20, 8) == Allocation(10, ("pack-10",))


def test_pinned_packs_never_leave() -> None:
    assert find_space([used(0, 5, pinned=True), used(5, 20)], 0, 20, 20, 16) is None


@given(
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4), st.integers(0, 9), st.booleans()), max_size=10),
    num_bytes=st.integers(1, 40),
    faulted_end=st.integers(0, 64),
)
def test_allocations_overlap_nothing_that_stays(
    sizes: list[tuple[int, int, int, bool]], num_bytes: int, faulted_end: int
) -> None:
    taken, end = [], 0
    for size, gap, last_used, pinned in sizes:
        taken.append(used(end + gap, end + gap + size, last_used, pinned))
        end += gap + size
    taken = [entry for entry in taken if entry.end <= 64]
    space = find_space(taken, 0, faulted_end, 64, num_bytes)
    if space is None:
        assert first_fit([entry for entry in taken if entry.pinned], 0, 64, num_bytes) is None
        return
    assert 0 <= space.begin <= 64 - num_bytes
    for entry in taken:
        overlaps = entry.begin < space.begin + num_bytes and space.begin < entry.end
        assert overlaps == (entry.pack_id in space.evicted)
        assert not (overlaps and entry.pinned)
