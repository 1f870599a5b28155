"""Hashes of routing blocks tell equal beginnings, within a tenant only."""

from __future__ import annotations

from torchrelay.gateway.inference.blocks import HASH_BYTES, block_hashes


def test_equal_beginnings_have_equal_hashes_until_they_part() -> None:
    one, other = list(range(200)), [*range(100), *range(500, 600)]
    hashes, others = block_hashes("t", one, 64), block_hashes("t", other, 64)
    assert len(hashes) == 3  # whole blocks only
    assert hashes[0] == others[0]
    assert hashes[1:] != others[1:] and len(set(hashes)) == 3
    assert all(len(digest) == HASH_BYTES for digest in hashes)


def test_a_block_counts_with_all_before_it() -> None:
    first = block_hashes("t", [1] * 64 + [2] * 64, 64)
    second = block_hashes("t", [3] * 64 + [2] * 64, 64)
    assert first[1] != second[1]


def test_tenants_have_nothing_in_common() -> None:
    assert not set(block_hashes("a", range(256), 64)) & set(block_hashes("b", range(256), 64))


def test_no_whole_block_no_hash() -> None:
    assert block_hashes("t", range(63), 64) == []
    assert block_hashes("t", range(63), 0) == []
    assert len(block_hashes("t", range(64), 64)) == 1
