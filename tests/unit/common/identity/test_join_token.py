"""Join tokens: for which ids, and how long; HMACs of many messages by one key."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import CallerRefused, CallerUnknown
from torchrelay.common.identity.join_token import check_join_token, join_token
from torchrelay.common.identity.keys import HmacKey

KEY, OTHER_KEY, END = b"k" * 32, b"o" * 32, 1_000


@pytest.mark.parametrize(("scope", "node_id"), [("node-", "node-a"), ("node-a-0", "node-a-0"), ("", "anything")])
def test_token_is_valid_for_ids_in_scope_until_its_end(scope: str, node_id: str) -> None:
    check_join_token(KEY, join_token(KEY, scope, END), node_id, END - 0.1)
    with pytest.raises(CallerRefused, match="expired"):
        check_join_token(KEY, join_token(KEY, scope, END), node_id, END)


def test_token_is_not_valid_beyond_its_scope() -> None:
    with pytest.raises(CallerRefused, match="begin with 'node-', not for 'prefill-0'"):
        check_join_token(KEY, join_token(KEY, "node-", END), "prefill-0", 0)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "..",
        join_token(OTHER_KEY, "node-", END),
        join_token(KEY, "node-", END).replace("node-", ""),
        join_token(KEY, "node-", END).replace(str(END), str(END + 1)),
        join_token(KEY, "node-", END)[:-1],
        f"node-.ä.{'0' * 64}",
    ],
)
def test_token_that_cluster_did_not_make_is_refused(token: str) -> None:
    with pytest.raises(CallerUnknown):
        check_join_token(KEY, token, "node-a", 0)


@given(key=st.binary(max_size=64), messages=st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_hmac_key_matches_rfc_2104(key: bytes, messages: list[bytes]) -> None:
    kept = HmacKey(key)
    assert [kept.digest(message) for message in messages] == [
        hmac.digest(key, message, "sha256") for message in messages
    ]


def test_hmac_key_longer_than_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 bytes"):
        HmacKey(bytes(65))
