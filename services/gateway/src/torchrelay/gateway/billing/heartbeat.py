"""Liveness of gateway processes: each increments its own counter in SQL; a gateway whose counter stops is gone.

An observer declares a gateway gone when its counter has not changed for a while on the observer's own clock: the clocks
of two machines are never compared. A missing row counts as stopped: its gateway shut down, or was declared gone while
it was stalled; in that case its next beat creates the row again. When its requests end, the gateway supplements the
amounts that the sweep billed meanwhile (ledger.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import delete, select

from torchrelay.common.errors import Unavailable
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.background import repeat
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import gateways

log = get_logger(__name__)
NO_ROW = -1  # the count of a gateway with unsettled requests but no row


@dataclass(frozen=True, slots=True)
class BeatObservation:
    """A count, and when the observer first saw it, on its own clock."""

    beat: int
    at: float


def observe_beats(
    seen: Mapping[str, BeatObservation], beats: Mapping[str, int], now: float
) -> dict[str, BeatObservation]:
    """``seen`` updated with ``beats``; gateways missing from ``beats`` are dropped."""
    return {
        gateway_id: seen[gateway_id]
        if gateway_id in seen and seen[gateway_id].beat == beat
        else BeatObservation(beat, now)
        for gateway_id, beat in beats.items()
    }


def stale_gateways(seen: Mapping[str, BeatObservation], now: float, after_s: float) -> set[str]:
    """The gateways whose count has not changed for ``after_s``."""
    return {gateway_id for gateway_id, observation in seen.items() if now - observation.at >= after_s}


class Heartbeat:
    """This process's row in the gateways table."""

    def __init__(self, database: Database, gateway_id: str) -> None:
        self._database = database
        self.gateway_id = gateway_id
        self.num_lost = 0  # how often other gateways removed the row of this process, because they took it for gone
        self._has_row = False

    async def run(self, every_s: float, timeout_s: float) -> None:
        """Beats until cancelled. A beat that is not committed within ``timeout_s`` is repeated."""

        async def beat_in_time() -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.beat()
            except TimeoutError:
                raise Unavailable(f"SQL did not answer within {timeout_s:g} s") from None

        await repeat("beat", beat_in_time, every_s)

    async def beat(self) -> None:
        """Increments the counter; the first beat creates the row and must precede the first opened request."""
        first = self._database.insert(gateways).values(gateway_id=self.gateway_id, beat=1)
        again = first.on_conflict_do_update(index_elements=["gateway_id"], set_={"beat": gateways.c.beat + 1})
        async with self._database.write() as connection:
            count = (await connection.execute(again.returning(gateways.c.beat))).scalar_one()
        if count == 1 and self._has_row:
            self.num_lost += 1
            log.warning("gateway_was_taken_for_gone", gateway_id=self.gateway_id)
        self._has_row = True

    async def leave(self) -> None:
        """Deletes the row: an orderly shutdown. Without SQL the other gateways will notice the stop by themselves."""
        try:
            async with self._database.write() as connection:
                await connection.execute(delete(gateways).where(gateways.c.gateway_id == self.gateway_id))
        except Unavailable as error:
            log.warning("heartbeat_left_behind", error=error.message)

    async def beats(self) -> dict[str, int]:
        """The counter of every gateway."""
        async with self._database.read() as connection:
            rows = await connection.execute(select(gateways.c.gateway_id, gateways.c.beat))
            return {row.gateway_id: row.beat for row in rows}


async def delete_gateway(database: Database, gateway_id: str, beat: int) -> None:
    """Deletes the row of a gateway that left nothing unsettled, if its count is still this one."""
    async with database.write() as connection:
        await connection.execute(delete(gateways).where(gateways.c.gateway_id == gateway_id, gateways.c.beat == beat))
