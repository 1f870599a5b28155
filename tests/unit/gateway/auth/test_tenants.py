from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import Conflict, InvalidRequest, NotFound
from torchrelay.gateway.auth.tenants import check_name


async def test_a_tenant_is_made_once_and_found_by_name(parts: AccountingRig) -> None:
    made = await parts.tenants.create("zoo", storage_quota_bytes=7, budget_nano=8)
    assert await parts.tenants.by_name("zoo") == made
    assert [tenant.name for tenant in await parts.tenants.list()] == ["acme", "zoo"]
    with pytest.raises(Conflict):
        await parts.tenants.create("zoo")
    with pytest.raises(NotFound):
        await parts.tenants.by_name("absent")


@given(st.text(max_size=70))
def test_a_name_has_no_slash_no_space_and_no_surprise(name: str) -> None:
    try:
        check_name(name, "model")
    except InvalidRequest as error:
        assert error.field == "model"
    else:
        assert 1 <= len(name) <= 64
        assert name.isascii() and name == name.lower()
        assert not set(name) & set("/ \t\n\\") and name not in (".", "..")


async def test_a_raised_budget_holds_for_the_next_request(parts: AccountingRig) -> None:
    _, token = await parts.keys.create("acme", parts.acme.tenant_id)
    assert (await parts.keys.authenticate(f"Bearer {token}")).budget_nano is None
    for budget in (7, 9, None):
        assert (await parts.tenants.change("acme", {"budget_nano": budget})).budget_nano == budget
        assert (await parts.keys.authenticate(f"Bearer {token}")).budget_nano == budget
    with pytest.raises(NotFound):
        await parts.tenants.change("absent", {"budget_nano": 1})
