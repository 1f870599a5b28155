"""Turns of tenants at a resource that few operations may use at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from torchrelay.common.errors import QueueFull
from torchrelay.gateway.limits.bounded_queue import BoundedQueue
from torchrelay.gateway.limits.shares import Shares


class TenantTurns:
    """At most ``at_once`` turns of a tenant run at once, and ``total_at_once`` in all; the rest wait.

    Tenants get equal shares of the time that their turns take. ``max_waiting``: requests of a tenant that may wait for
    ``resource``, as errors call it. ``shares`` bounds the turns that run or wait in ``turn``, with an error that names
    the setting.
    """

    def __init__(
        self,
        *,
        at_once: int,
        total_at_once: int,
        max_waiting: int = sys.maxsize,
        resource: str = "their turn",
        shares: Shares | None = None,
    ) -> None:
        self._queue: BoundedQueue[asyncio.Future[None]] = BoundedQueue(at_once, max_waiting, 0)
        self._num_free = total_at_once
        self._max_waiting, self._resource, self._shares = max_waiting, resource, shares

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it for the block. Raises ``Overloaded`` or ``AtCapacity`` instead of waiting."""
        with nullcontext() if self._shares is None else self._shares.held(tenant_id):
            begin_s = await self.acquire(tenant_id)
            try:
                yield
            finally:
                self.release(tenant_id, begin_s)

    async def acquire(self, tenant_id: str) -> float:
        """Waits for a turn, which ``release`` ends; returns when it began. Raises ``QueueFull``."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        if not self._queue.add(tenant_id, turn, 0):
            raise QueueFull(f"{self._max_waiting} of your requests already wait for {self._resource}")
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not self._queue.remove(tenant_id, turn):
                self.release(tenant_id, loop.time())  # it began in the same moment
            raise
        return loop.time()

    def release(self, tenant_id: str, begin_s: float) -> None:
        self._num_free += 1
        self._queue.ended(tenant_id, asyncio.get_running_loop().time() - begin_s)
        self._grant()

    def _grant(self) -> None:
        while self._num_free and (taken := self._queue.next(lambda _: True)) is not None:
            self._num_free -= 1
            if not taken[0].done():  # a cancelled one ends its turn itself
                taken[0].set_result(None)
