"""Settles requests whose gateway is gone, from the usage registers their workers published.

Every gateway sweeps; several may find the same request, since settling happens exactly once (ledger.py). While the
registers cannot be read nothing is settled; the next round tries again. A swept request is billed for what its workers
sent: at least what the client received, plus at most what was in flight. If its gateway was only stalled and delivers
more, it supplements the bill.

Observing and settling run in two tasks, so a slow settlement delays no observation. This gateway's beats have a third.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Protocol

from sqlalchemy import select

from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.background import repeat
from torchrelay.gateway.billing.heartbeat import (
    NO_ROW,
    BeatObservation,
    Heartbeat,
    delete_gateway,
    observe_beats,
    stale_gateways,
)
from torchrelay.gateway.billing.ledger import Ledger, opened_of
from torchrelay.gateway.billing.usage_register import usages_from_registers
from torchrelay.gateway.billing.usage_register_reader import RegistersByRequest
from torchrelay.gateway.core import OpenedRequest
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import opened

log = get_logger(__name__)
MAX_REQUESTS_PER_ROUND = 1000  # settled at once, over all gateways that are gone
_MAX_MISSED_ROUNDS = 3


class RegisterSource(Protocol):
    async def read(self, gateway_id: str, request_ids: Collection[str]) -> RegistersByRequest:
        """Raises ``Unavailable`` if the registers cannot be read."""


class OrphanSweep:
    """Settles for gateways that stopped."""

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        heartbeat: Heartbeat,
        registers: Callable[[], RegisterSource | None],
        *,
        every_s: float,
        after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``registers`` returns the source, or ``None`` until NATS is connected."""
        self._database = database
        self._ledger = ledger
        self._heartbeat = heartbeat
        self._registers = registers
        self._every_s = every_s
        self._after_s = after_s
        self._clock = clock
        self._seen: dict[str, BeatObservation] = {}
        self._looked_at = float("-inf")
        self._stopped: dict[str, int] = {}  # gateways taken for gone, with their last count

    async def run(self) -> None:
        """Observes and settles until cancelled. A failed round is logged and the next one tries again."""
        async with asyncio.TaskGroup() as group:
            group.create_task(repeat("sweep", self.observe, self._every_s), name="sweep-observe")
            group.create_task(repeat("sweep", self.settle, self._every_s), name="sweep-settle")

    async def observe(self) -> None:
        """Notes the gateways whose count stands still. Raises ``Unavailable`` without SQL."""
        # Owners before beats: a gateway beats before it opens a request, so the beats include every new owner.
        unsettled = await self._unsettled_owners()
        beats = await self._heartbeat.beats()
        now = self._clock()
        if now - self._looked_at > _MAX_MISSED_ROUNDS * self._every_s:
            self._seen = {}  # SQL was away or this process stalled: a count unchanged since then proves nothing
        self._looked_at = now
        self._seen = observe_beats(self._seen, dict.fromkeys(unsettled, NO_ROW) | beats, now)
        stopped = stale_gateways(self._seen, now, self._after_s) - {self._heartbeat.gateway_id}
        self._stopped = {gateway_id: self._seen[gateway_id].beat for gateway_id in sorted(stopped)}

    async def settle(self) -> int:
        """Settles requests of stopped gateways, up to a limit; returns their number. Raises ``Unavailable``."""
        await self._ledger.count_uncounted()
        num_settled = 0
        for gateway_id, beat in self._stopped.items():
            if num_settled < MAX_REQUESTS_PER_ROUND:
                num_settled += await self._settle_for(gateway_id, beat, MAX_REQUESTS_PER_ROUND - num_settled)
        return num_settled

    async def _settle_for(self, gateway_id: str, beat: int, at_most: int) -> int:
        requests = await self._unsettled_of(gateway_id, at_most)
        if not requests:
            await delete_gateway(self._database, gateway_id, beat)
            return 0
        source = self._registers()
        if source is None:
            return 0
        registers = await source.read(gateway_id, {request.request_id for request in requests})
        if (await self._heartbeat.beats()).get(gateway_id, NO_ROW) != beat:
            return 0  # it was only stalled, and came back while the registers were read
        # A batch's line runs again, elsewhere, and pays then.
        used = {each.request_id: {} if each.batch_id else registers.get(each.request_id, {}) for each in requests}
        usages = {each.request_id: usages_from_registers(each, used[each.request_id]) for each in requests}
        await asyncio.gather(*(self._ledger.settle(*each) for each in usages.items()))
        log.info("swept", gateway_id=gateway_id, num_requests=len(requests))
        return len(requests)

    async def _unsettled_owners(self) -> set[str]:
        query = select(opened.c.gateway_id).where(opened.c.settled_unix_us.is_(None)).distinct()
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars())

    async def _unsettled_of(self, gateway_id: str, at_most: int) -> list[OpenedRequest]:
        query = select(opened).where(opened.c.gateway_id == gateway_id, opened.c.settled_unix_us.is_(None))
        async with self._database.read() as connection:
            rows = (await connection.execute(query.limit(at_most))).all()
        return [opened_of(row) for row in rows]
