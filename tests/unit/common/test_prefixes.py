from __future__ import annotations

from torchrelay.common.prefixes import KEY_BYTES, prefix_keys


def test_a_key_stands_for_everything_before_it() -> None:
    keys = list(prefix_keys("tenant", range(40), 16))
    assert [len(key) for key in keys] == [KEY_BYTES] * 2
    assert list(prefix_keys("tenant", range(35), 16)) == keys
    assert list(prefix_keys("tenant", [7, *range(1, 40)], 16))[1] != keys[1]
    assert list(prefix_keys("tenant", [*range(39), 7], 16)) == keys


def test_tenants_and_block_sizes_have_keys_of_their_own() -> None:
    keys = [*prefix_keys("a", range(64), 16), *prefix_keys("b", range(64), 16), *prefix_keys("a", range(64), 32)]
    assert len(set(keys)) == len(keys)
