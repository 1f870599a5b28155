"""In any sequence of operations nothing pinned is lost, nothing overlaps, and restarts forget nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.transfer.arena.arena_packs import release_recovered
from tests.unit.transfer.loopback_holders import make_pack
from torchrelay.transfer.arena.arena import RECOVERED, Arena
from torchrelay.transfer.arena.range_allocator import Allocation, UsedRange, find_space, first_fit
from torchrelay.transfer.arena.slab_table import TABLE_BYTES
from torchrelay.transfer.errors import ArenaFull, UnknownBuffer
from torchrelay.transfer.manifest import pack_id_of

PAGE = 4096
PACKS = [make_pack(num_pages * PAGE - 100, seed=number) for number, num_pages in enumerate((5, 8, 13))]
IDS = [pack_id_of(manifest.encode()) for _, manifest in PACKS]
numbers = st.integers(0, len(PACKS) - 1)
owners = st.sampled_from(["worker-1", "worker-2"])


class ArenaLife(RuleBasedStateMachine):
    """Reserve, fill, pin, drop, grow, restart in any order, against a plain model: packs, their chunks, their pins."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "arena"
        self.arena = Arena.create(self.path, TABLE_BYTES + 24 * PAGE)
        self.filled: dict[int, int] = {}  # pack -> chunks accepted
        self.pins: dict[int, set[str]] = {}
        self.leaving: set[int] = set()  # dropped with their last pin

    def pinned(self, number: int) -> bool:
        return bool(self.pins.get(number))

    def forget_evicted(self) -> None:
        for number in list(self.filled):
            if self.arena.get(IDS[number]) is None:
                assert not self.pinned(number), "a pinned pack was evicted"
                del self.filled[number]

    @rule(number=numbers)
    def reserve(self, number: int) -> None:
        try:
            slab = self.arena.reserve(PACKS[number][1].encode())
        except ArenaFull:
            assert number not in self.filled
            assert any(self.pins.values())
            return
        self.filled.setdefault(number, 0)
        self.leaving.discard(number)
        assert slab.num_verified <= self.filled[number]
        self.forget_evicted()

    @rule(number=numbers, count=st.integers(1, 4))
    def fill(self, number: int, count: int) -> None:
        slab = self.arena.get(IDS[number])
        if slab is None:
            return
        for index in slab.missing()[:count]:
            span = slab.manifest.chunk_range(index)
            slab.chunk(index)[:] = PACKS[number][0][span.begin : span.end]
            slab.accept(index)
            self.filled[number] += 1

    @rule(number=numbers, owner=owners)
    def pin(self, number: int, owner: str) -> None:
        try:
            self.arena.pin(IDS[number], owner)
        except UnknownBuffer:
            assert number not in self.filled
        else:
            self.pins.setdefault(number, set()).add(owner)

    @rule(number=numbers, owner=owners)
    def unpin(self, number: int, owner: str) -> None:
        self.arena.unpin(IDS[number], owner)
        self.pins.get(number, set()).discard(owner)
        self.let_leave()

    def let_leave(self) -> None:
        for number in [number for number in self.leaving if not self.pinned(number)]:
            self.leaving.remove(number)
            del self.filled[number]

    @rule(number=numbers)
    def drop(self, number: int) -> None:
        dropped = self.arena.drop(IDS[number])
        assert dropped == (number in self.filled and not self.pinned(number))
        if dropped:
            del self.filled[number]

    @rule(number=numbers)
    def drop_when_unpinned(self, number: int) -> None:
        dropped = self.arena.drop(IDS[number], when_unpinned=True)
        assert dropped == (number in self.filled and not self.pinned(number))
        if number in self.filled:
            self.leaving.add(number)
            self.let_leave()

    @rule(num_pages=st.integers(1, 8))
    def grow(self, num_pages: int) -> None:
        before = self.arena.faulted_bytes
        assert before <= self.arena.grow(num_pages * PAGE) <= self.arena.capacity_bytes

    @rule()
    def restart(self) -> None:
        self.arena.close()
        self.arena = Arena.create(self.path, TABLE_BYTES + 24 * PAGE)
        assert {slab.pack_id for slab in self.arena.slabs()} == {IDS[number] for number in self.filled}
        self.pins = {number: {RECOVERED} for number in self.filled}
        self.leaving = set()

    @rule()
    def release_recovered(self) -> None:
        release_recovered(self.arena)
        for pinned_by in self.pins.values():
            pinned_by.discard(RECOVERED)
        self.let_leave()

    @invariant()
    def invariants_hold(self) -> None:
        self.arena.check_integrity()
        slabs = self.arena.slabs()
        assert {slab.pack_id for slab in slabs} == {IDS[number] for number in self.filled}
        taken = sum(slab.num_slab_bytes for slab in slabs)
        assert self.arena.free_bytes == self.arena.capacity_bytes - TABLE_BYTES - taken
        for number, count in self.filled.items():
            slab = self.arena.get(IDS[number])
            assert slab is not None
            data, manifest = PACKS[number]
            assert slab.recheck() == count
            for index in range(slab.num_chunks):
                span = manifest.chunk_range(index)
                if slab.is_verified(index):
                    assert slab.chunk(index) == data[span.begin : span.end]

    def teardown(self) -> None:
        self.arena.close(unlink=True)
        self.folder.cleanup()


ArenaLife.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestArenaLife = ArenaLife.TestCase


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
    beside = [used(0, 6, last_used=2), used(6, 9, last_used=1), used(9, 20, pinned=True)]
    assert find_space(beside, 0, 20, 20, 6) == Allocation(0, ("pack-0",)), "the older pack lies behind the range"


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
