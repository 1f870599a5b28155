"""Keys: HMACs of many messages by one key are those of the standard library."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.identity.keys import HmacKey


@given(key=st.binary(max_size=64), messages=st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_hmac_key_matches_rfc_2104(key: bytes, messages: list[bytes]) -> None:
    kept = HmacKey(key)
    assert [kept.digest(message) for message in messages] == [
        hmac.digest(key, message, "sha256") for message in messages
    ]


def test_hmac_key_longer_than_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 bytes"):
        HmacKey(bytes(65))
