"""Limits of concurrent expensive operations per tenant, so that a tenant with many leaves others their turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from weakref import WeakValueDictionary

from torchrelay.gateway.limits.shares import Shares


class TenantSemaphore:
    """At most ``at_once`` turns of one tenant and ``total_at_once`` in all; the rest wait, first come first served.

    At most ``at_once`` operations of a tenant wait for the total, so tenants take turns. ``shares`` bounds the number
    that run or wait; None where it is bounded already.
    """

    def __init__(self, shares: Shares | None, *, at_once: int, total_at_once: int) -> None:
        self._shares = shares
        self._at_once = at_once
        self._total = asyncio.Semaphore(total_at_once)
        self._semaphores = WeakValueDictionary[str, asyncio.Semaphore]()  # of the tenants that run or wait

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it for the block. Raises ``Overloaded`` or ``AtCapacity`` instead of waiting."""
        with nullcontext() if self._shares is None else self._shares.held(tenant_id):
            semaphore = self._semaphores.setdefault(tenant_id, asyncio.Semaphore(self._at_once))
            async with semaphore, self._total:
                yield
