from __future__ import annotations

import pytest

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import Conflict, NotFound
from torchrelay.gateway.core import ServiceClass


async def test_tenant_is_created_once_and_read_by_name(parts: AccountingRig) -> None:
    made = await parts.tenants.create("zoo", storage_quota_bytes=7, budget_nano=8, service_class="batch")
    assert await parts.tenants.by_name("zoo") == made
    assert [tenant.name for tenant in await parts.tenants.list()] == ["acme", "zoo"]
    with pytest.raises(Conflict):
        await parts.tenants.create("zoo")
    with pytest.raises(NotFound):
        await parts.tenants.by_name("absent")


async def test_changed_budget_applies_to_the_next_request(parts: AccountingRig) -> None:
    _, token = await parts.keys.create("acme", parts.acme.tenant_id)
    assert (await parts.keys.authenticate(f"Bearer {token}")).budget_nano is None
    for budget in (7, 9, None):
        assert (await parts.tenants.change("acme", {"budget_nano": budget})).budget_nano == budget
        assert (await parts.keys.authenticate(f"Bearer {token}")).budget_nano == budget
    with pytest.raises(NotFound):
        await parts.tenants.change("absent", {"budget_nano": 1})


async def test_changed_class_applies_to_the_next_request(parts: AccountingRig) -> None:
    _, token = await parts.keys.create("acme", parts.acme.tenant_id)
    expected = {"batch": ServiceClass.BATCH, "interactive": ServiceClass.INTERACTIVE, None: ServiceClass.STANDARD}
    for name, service_class in expected.items():
        assert (await parts.tenants.change("acme", {"service_class": name})).service_class == name
        assert (await parts.keys.authenticate(f"Bearer {token}")).service_class is service_class
