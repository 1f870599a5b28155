from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.engine.core import KvPoolFull
from torchrelay.engine.kv.layout import KvShape
from torchrelay.engine.kv.pool import KvPool, PageAllocator

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype_bytes=4)


def test_cut_is_layer_major_and_takes_no_more_than_there_is() -> None:
    pool = KvPool(10_000)
    pages = pool.partition(SHAPE, torch.float32, page_tokens=8)
    assert SHAPE.bytes_per_token == 2 * 3 * 2 * 4 * 4
    assert pages.allocator.num_pages == 10_000 // (8 * SHAPE.bytes_per_token)
    assert pages.kv.shape == (3, 2, pages.allocator.num_pages * 8, 2, 4)
    assert pages.kv[1, 0].is_contiguous()


def test_the_bytes_are_cut_anew_for_another_dtype() -> None:
    pool = KvPool(1 << 16)
    first = pool.partition(SHAPE, torch.float32, page_tokens=8)
    second = pool.partition(KvShape(1, 1, 8, 2), torch.bfloat16, page_tokens=16)
    assert second.kv.data_ptr() == first.kv.data_ptr()
    assert second.allocator.num_pages == (1 << 16) // (16 * 32)


def test_tables_share_the_full_pages_of_their_context() -> None:
    pages = KvPool(1 << 16).partition(SHAPE, torch.float32, page_tokens=8)
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


def test_full_takes_nothing() -> None:
    allocator = PageAllocator(4)
    held = allocator.take(3)
    with pytest.raises(KvPoolFull, match="2 KV pages are needed, 1 of 4 are free"):
        allocator.take(2)
    assert allocator.num_free == 1
    allocator.check_integrity([held])


def test_copying_a_page_copies_all_layers() -> None:
    pages = KvPool(1 << 16).partition(SHAPE, torch.float32, page_tokens=8)
    pages.kv.copy_(torch.randn(pages.kv.shape))
    pages.copy_page(1, 5)
    assert torch.equal(pages.kv[:, :, 40:48], pages.kv[:, :, 8:16])
    assert not torch.equal(pages.kv[:, :, 32:40], pages.kv[:, :, 8:16])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "retain"]), st.integers(0, 9)), max_size=60))
def test_counts_hold_under_any_sequence(moves: list[tuple[str, int]]) -> None:
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
                allocator.retain(page)
        allocator.check_integrity(tables)
        assert allocator.num_free == 20 - len({page for table in tables for page in table})
