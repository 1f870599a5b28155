"""Turns of tenants at something expensive: each has a few at once, so that however many it asks for, others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from weakref import WeakValueDictionary

from torchrelay.gateway.limits.shares import Shares


class TenantSemaphore:
    """At most ``at_once`` turns of one tenant and ``total_at_once`` in all; the rest wait, first come first served.

    Of a tenant at most ``at_once`` wait for the total, so tenants take turns. ``shares`` bounds who runs or waits; None
    where that is bounded already.
    """

    def __init__(self, shares: Shares | None, *, at_once: int, total_at_once: int) -> None:
        self._shares = shares
        self._at_once = at_once
        self._total = asyncio.Semaphore(total_at_once)
        self._lanes = WeakValueDictionary[str, asyncio.Semaphore]()  # of the tenants that run or wait

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it for the block. Raises ``Overloaded`` or ``AtCapacity`` instead of waiting."""
        with nullcontext() if self._shares is None else self._shares.held(tenant_id):
            lane = self._lanes.setdefault(tenant_id, asyncio.Semaphore(self._at_once))
            async with lane, self._total:
                yield
