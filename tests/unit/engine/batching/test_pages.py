from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.engine.batching.pages import PageAllocator, PageTables
from torchrelay.engine.core import KvPoolFull


def test_tables_share_full_pages_of_context() -> None:
    pages = PageTables(42, page_tokens=8)
    tables = pages.reserve(num_context_tokens=20, num_tokens=33, num_tables=3)
    assert [len(table) for table in tables] == [5, 5, 5]
    assert len({tuple(table[:2]) for table in tables}) == 1
    own = [page for table in tables for page in table[2:]]
    assert len(set(own)) == 9
    assert pages.allocator.num_pages - pages.allocator.num_free == pages.pages_to_reserve(20, 33, 3) == 11
    pages.allocator.check_integrity(tables)
    pages.allocator.release(tables[1])
    pages.allocator.check_integrity([tables[0], tables[2]])
    with pytest.raises(AssertionError):
        pages.allocator.check_integrity([tables[0]])


def test_take_beyond_free_pages_takes_none() -> None:
    allocator = PageAllocator(4)
    held = allocator.take(3)
    with pytest.raises(KvPoolFull, match="2 KV pages are needed, 1 of 4 are free"):
        allocator.take(2)
    assert allocator.num_free == 1
    allocator.check_integrity([held])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "retain"]), st.integers(0, 9)), max_size=60))
def test_random_operations_keep_page_counts(moves: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(20)
    tables: list[list[int]] = []
    for move, number in moves:
        if move == "take" and number <= allocator.num_free:
            tables.append(allocator.take(number))
        elif move == "share" and tables:
            table = list(tables[number % len(tables)])
            allocator.share(table)
            tables.append(table)
        elif move == "release" and tables:
            allocator.release(tables.pop(number % len(tables)))
        elif move == "retain" and tables:
            for page in tables[number % len(tables)]:
                allocator.retained.add(page)
        allocator.check_integrity(tables)
        assert allocator.num_free == 20 - len({page for table in tables for page in table})
