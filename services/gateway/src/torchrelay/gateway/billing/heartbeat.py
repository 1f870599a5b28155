"""Liveness of gateway processes: each increments its own counter in SQL; one whose counter stops is gone.

No two machines' clocks are compared: an observer declares a gateway gone when its counter has not changed for a while
on the observer's own clock. A missing row counts as stopped: its gateway shut down, or was declared gone while it was
stalled; in that case its next beat creates the row again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import delete, select

from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import gateways

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

    async def beat(self) -> None:
        """Increments the counter; the first beat creates the row and must precede the first opened request."""
        first = self._database.insert(gateways).values(gateway_id=self.gateway_id, beat=1)
        async with self._database.write() as connection:
            await connection.execute(
                first.on_conflict_do_update(index_elements=["gateway_id"], set_={"beat": gateways.c.beat + 1})
            )

    async def leave(self) -> None:
        """Deletes the row: an orderly shutdown."""
        await delete_gateways(self._database, [self.gateway_id])

    async def beats(self) -> dict[str, int]:
        """The counter of every gateway."""
        async with self._database.read() as connection:
            rows = await connection.execute(select(gateways.c.gateway_id, gateways.c.beat))
            return {row.gateway_id: row.beat for row in rows}


async def delete_gateways(database: Database, gateway_ids: Iterable[str]) -> None:
    """Deletes the rows of gateways that left nothing unsettled."""
    async with database.write() as connection:
        await connection.execute(delete(gateways).where(gateways.c.gateway_id.in_(list(gateway_ids))))
