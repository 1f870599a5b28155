"""Live figures for the console: computed once a second for all viewers, and only while there are any."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import func, select

from torchrelay.common.clock import now_unix_us
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.clients.scheduler import SchedulerClient
from torchrelay.gateway.core import FirstToken, Principal
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import ledger, models, tenants

EVERY_S = 1.0
RATES_OVER_S = 10
TTFT_OVER_S = 60
_STATE = scheduler_pb2.RelayView.State


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of all tenants at a moment."""

    at_unix_s: float = 0.0
    settled: dict[str, tuple[int, int]] = field(default_factory=dict)  # requests and tokens by tenant id
    versions: Sequence[tuple[str, str]] = ()  # tenant id and version of each model
    first_tokens: Sequence[FirstToken] = ()
    cluster: scheduler_pb2.ClusterView | None = None  # None: the scheduler does not answer


class LiveFeed:
    def __init__(self, database: Database, scheduler: SchedulerClient, first_tokens: deque[FirstToken]) -> None:
        self._database = database
        self._scheduler = scheduler
        self._first_tokens = first_tokens
        self._num_viewers = 0
        self._is_closed = False
        self._sample = Sample()
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
            versions = (await connection.execute(select(models.c.tenant_id, models.c.version_id))).all()
        oldest = time.monotonic() - TTFT_OVER_S
        return Sample(
            time.time(),
            {tenant_id: (int(num_requests), int(num_tokens)) for tenant_id, num_requests, num_tokens in sums},
            [(tenant_id, version_id) for tenant_id, version_id in versions],
            [each for each in self._first_tokens if each.at_s >= oldest],
            await self._scheduler.cluster(),
        )


def seen_by(caller: Principal, sample: Sample) -> dict[str, Any]:
    """Returns the figures that ``caller`` may see: all of them for an admin, a tenant's own for a tenant."""

    def is_own(tenant_id: str) -> bool:
        return caller.is_admin or tenant_id == caller.tenant_id

    def is_named_own(model: str) -> bool:
        return caller.is_admin or model.startswith(f"{caller.tenant}/")

    sums = [sums for tenant_id, sums in sample.settled.items() if is_own(tenant_id)]
    versions = [version_id for tenant_id, version_id in sample.versions if is_own(tenant_id)]
    ttfts = sorted(each.ttft_s for each in sample.first_tokens if is_own(each.tenant_id))
    cluster = sample.cluster or scheduler_pb2.ClusterView()
    awake = {instance.version_id for instance in cluster.instances if instance.state == "ready"}
    demand = [each for each in cluster.demand if is_named_own(each.model)]
    return {
        "at_unix_s": sample.at_unix_s,
        "is_admin": caller.is_admin,
        "tenant": caller.tenant,
        "requests_per_s": sum(num for num, _ in sums) / RATES_OVER_S,
        "tokens_per_s": sum(num for _, num in sums) / RATES_OVER_S,
        "ttft_p50_s": _quantile(ttfts, 0.5),
        "ttft_p95_s": _quantile(ttfts, 0.95),
        "num_awake": sum(version_id in awake for version_id in versions),
        "num_models": len(versions),
        "num_running": sum(each.num_running for each in demand),
        "num_waiting": sum(each.num_waiting for each in demand),
        "is_scheduler_away": sample.cluster is None,
        "relays": [_relay(each, caller) for each in cluster.relays if is_named_own(each.model)],
    }


def _relay(relay: scheduler_pb2.RelayView, caller: Principal) -> dict[str, Any]:
    return {
        "model": relay.model,
        "target": relay.target if caller.is_admin else "",  # hosts are the operator's
        "state": _STATE.Name(relay.state).removeprefix("STATE_").lower(),
        "verified": relay.num_chunks_verified / max(relay.num_chunks, 1),
        "bytes_per_s": relay.bytes_per_s,
        "left_s": relay.left_s,
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
