"""Live figures for the console: computed once a second for all viewers, and only while there are any."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from sqlalchemy import func, select

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Unavailable
from torchrelay.common.health import Health
from torchrelay.gateway.catalog.catalog import Catalog
from torchrelay.gateway.clients.scheduler import SchedulerClient
from torchrelay.gateway.console.alerts import alerts, held
from torchrelay.gateway.console.core import Listed
from torchrelay.gateway.console.sample import RATES_OVER_S, Sample, seen_by
from torchrelay.gateway.core import FirstToken, Principal
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import ledger, models, tenants, versions

EVERY_S = 1.0
TTFT_OVER_S = 60
GAP_S = 10.0  # without a viewer, after which alerts are held anew


class _Description(msgspec.Struct):
    """The part of a version's description that is shown."""

    pack_bytes: int = 0


class LiveFeed:
    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        scheduler: SchedulerClient,
        health: Health,
        first_tokens: deque[FirstToken],
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._listed: tuple[int, list[Listed]] = -1, []  # the models, and the version of the catalog that has them
        self._scheduler = scheduler
        self._health = health
        self._first_tokens = first_tokens
        self._num_viewers = 0
        self._is_closed = False
        self._sample = Sample()
        self._alerts_since: dict[str, float] = {}  # by key
        self._encoded: dict[str, bytes] = {}  # of the sample, by tenant id; "" is the admin's
        self._tick = asyncio.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts a viewer for the block."""
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    def close(self) -> None:
        """Ends all streams, so that no viewer delays the gateway's end."""
        self._is_closed = True
        self._tick.set()

    async def refresh(self) -> None:
        if not self._num_viewers:
            return
        self._sample, self._encoded = await self._take(), {}
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()

    async def next(self, caller: Principal, leaving: asyncio.Task[None]) -> bytes | None:
        """The next sample as ``caller`` may see it; None at the end, or when its client has left."""
        waiting = asyncio.create_task(self._tick.wait())
        try:
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._is_closed or leaving.done():
            return None
        if (encoded := self._encoded.get(caller.tenant_id)) is None:
            encoded = self._encoded[caller.tenant_id] = msgspec.json.encode(seen_by(caller, self._sample))
        return encoded

    async def _take(self) -> Sample:
        now, before = time.time(), self._sample
        try:
            settled, listed = await self._read()
        except Unavailable:  # an alert tells it
            settled, listed = {}, [*before.models]
        cluster = await self._scheduler.cluster()
        holding = alerts(listed, cluster, await self._health.report(), self._database.disk_fault)
        since = self._alerts_since if now - before.at_unix_s < GAP_S else {}
        self._alerts_since = {alert.key: since.get(alert.key, now) for alert in holding}
        oldest = time.monotonic() - TTFT_OVER_S
        first_tokens = [each for each in self._first_tokens if each.at_s >= oldest]
        return Sample(now, settled, listed, first_tokens, cluster, held(holding, self._alerts_since, now))

    async def _read(self) -> tuple[dict[str, tuple[int, int]], list[Listed]]:
        """Requests and tokens by tenant id, and the catalog's models."""
        since = now_unix_us() - RATES_OVER_S * 1_000_000
        tokens = func.sum(ledger.c.num_prompt_tokens + ledger.c.num_output_tokens)
        # By tenant, as the index is.
        settled = (
            select(ledger.c.tenant_id, func.count(func.distinct(ledger.c.request_id)), tokens)
            .where(ledger.c.tenant_id.in_(select(tenants.c.tenant_id)), ledger.c.settled_unix_us >= since)
            .group_by(ledger.c.tenant_id)
        )
        async with self._database.read() as connection:
            sums = (await connection.execute(settled)).all()
        version = await self._catalog.version()
        if self._listed[0] != version:
            self._listed = version, await self._models()
        by_tenant = {tenant_id: (int(num_requests), int(num_tokens)) for tenant_id, num_requests, num_tokens in sums}
        return by_tenant, self._listed[1]

    async def _models(self) -> list[Listed]:
        served = func.coalesce(versions.c.base_version_id, versions.c.version_id)
        named = select(tenants.c.name, models.c.name, models.c.tenant_id, served, versions.c.description)
        async with self._database.read() as connection:
            listed = (await connection.execute(named.join_from(models, tenants).join(versions))).all()
        decode = msgspec.json.Decoder(_Description).decode
        return [
            Listed(f"{tenant}/{name}", tenant_id, version_id, decode(description).pack_bytes)
            for tenant, name, tenant_id, version_id, description in listed
        ]
