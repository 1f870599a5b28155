from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.common.tokens.prefix_hashes import HASH_BYTES, PAGE_TOKENS, ROUTING_TOKENS, page_hashes, routing_hashes

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=200)


def test_hash_covers_whole_prefix() -> None:
    keys = list(page_hashes("tenant", range(40)))
    assert [len(key) for key in keys] == [HASH_BYTES] * 2
    assert list(page_hashes("tenant", range(35))) == keys
    assert list(page_hashes("tenant", [7, *range(1, 40)]))[1] != keys[1]
    assert list(page_hashes("tenant", [*range(39), 7])) == keys


@pytest.mark.parametrize("changed", range(0, 160, 7))
def test_token_changes_hashes_from_its_page_on(changed: int) -> None:
    """Across routing blocks too."""
    tokens = list(range(160))
    keys = list(page_hashes("tenant", tokens))
    tokens[changed] = 999
    same = [before == after for before, after in zip(keys, page_hashes("tenant", tokens), strict=True)]
    assert same == [page < changed // PAGE_TOKENS for page in range(10)]


@settings(max_examples=30)
@given(TOKENS, st.text(max_size=5))
def test_routing_keys_are_every_fourth_page_key(tokens: list[int], salt: str) -> None:
    keys = list(page_hashes(salt, tokens))
    assert len(keys) == len(tokens) // PAGE_TOKENS
    assert list(routing_hashes(salt, tokens)) == keys[3::4]
    assert len(keys[3::4]) == len(tokens) // ROUTING_TOKENS


def test_tenants_have_keys_of_their_own() -> None:
    keys = [*page_hashes("a", range(128)), *page_hashes("b", range(128))]
    assert len(set(keys)) == len(keys)
