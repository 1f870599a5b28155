"""Join tokens: for which ids, and how long."""

from __future__ import annotations

import pytest

from torchrelay.common.errors import CallerRefused, CallerUnknown
from torchrelay.common.identity.join_token import check_join_token, join_token

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
