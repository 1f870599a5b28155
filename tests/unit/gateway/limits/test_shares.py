from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.errors import AtCapacity, Overloaded
from torchrelay.gateway.limits.shares import ShareLimits, Shares

LIMITS = ShareLimits("open requests", 5, "max_open_requests", 3, "max_open_requests_per_tenant")


def test_takes_above_share_or_total_are_refused() -> None:
    shares = Shares(LIMITS)
    shares.take("acme", 3)
    with pytest.raises(Overloaded, match=r"has 3 open requests .* share is 3 .*max_open_requests_per_tenant") as own:
        shares.take("acme")
    assert (own.value.http_status, own.value.code) == (429, "overloaded")
    shares.take("zoo", 2)
    with pytest.raises(AtCapacity, match=r"5 open requests, and its limit is 5 .setting max_open_requests.") as total:
        shares.take("zoo")
    assert (total.value.http_status, total.value.grpc_status, total.value.retry_after_s) == (503, "UNAVAILABLE", 1.0)
    shares.give_back("acme")
    shares.take("zoo")


def test_blocks_and_accounts_release_their_amounts() -> None:
    shares = Shares(LIMITS)
    with pytest.raises(ZeroDivisionError), shares.held("acme"), shares.account("acme") as account:
        account.take(2)
        assert (shares.num_held, shares.held_by("acme"), account.amount) == (3, 3, 2)
        account.release(1)
        account.release(2)
        assert (shares.num_held, shares.held_by("acme"), account.amount) == (2, 2, 1)
        account.release()
        account.release()
        assert shares.num_held == 1
        raise ZeroDivisionError
    assert (shares.num_held, shares.held_by("acme")) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4))))
def test_shares_are_exact_and_never_exceeded(takes: list[tuple[str, int]]) -> None:
    shares = Shares(LIMITS)
    held: list[tuple[str, int]] = []
    for tenant, amount in takes:
        try:
            shares.take(tenant, amount)
            held.append((tenant, amount))
        except Overloaded:
            if held:
                shares.give_back(*held.pop(0))
        for each in "abc":
            assert shares.held_by(each) == sum(amount for tenant, amount in held if tenant == each) <= 3
        assert shares.num_held == sum(amount for _, amount in held) <= 5
