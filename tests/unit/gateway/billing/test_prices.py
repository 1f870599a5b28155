from __future__ import annotations

import pytest

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest


async def test_new_price_applies_from_its_start(parts: AccountingRig) -> None:
    assert (await parts.prices.current("acme/glossary")).price_id == "price-default"
    added = await parts.prices.add("acme/glossary", 1, 2, 3)
    assert await parts.prices.current("acme/glossary") == added
    assert (await parts.prices.current("acme/other")).price_id == "price-default"
    later = await parts.prices.add("", 7, 8, 9, now_unix_us() + 10**9)
    assert (await parts.prices.current("acme/other")).price_id == "price-default"
    assert [price.price_id for price in await parts.prices.all()] == ["price-default", added.price_id, later.price_id]
    with pytest.raises(InvalidRequest):
        await parts.prices.add("", 7, 8, 9, 5)
    with pytest.raises(Conflict):
        await parts.prices.add("", 7, 8, 9, later.valid_from_unix_us)
