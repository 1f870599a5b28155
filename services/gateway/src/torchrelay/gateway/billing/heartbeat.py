"""Which gateway processes live: each counts its own beat up in SQL; who stops counting is gone.

Nobody compares clocks of two machines: an observer takes a gateway for gone when *its* count stood still for a while on
the *observer's* clock. A row that is not there stands still too: its gateway left in order, or was taken for gone while
it stood still itself, and then it makes the row again with its next beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import delete, select

from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import gateways

NO_ROW = -1  # the count of a gateway that has requests but no row


@dataclass(frozen=True, slots=True)
class BeatObservation:
    """A count, and when (on the observer's clock) it was first seen."""

    beat: int
    at: float


def observe_beats(
    seen: Mapping[str, BeatObservation], beats: Mapping[str, int], now: float
) -> dict[str, BeatObservation]:
    """What was seen of every gateway in ``beats``, brought up to date."""
    return {
        gateway_id: seen[gateway_id]
        if gateway_id in seen and seen[gateway_id].beat == beat
        else BeatObservation(beat, now)
        for gateway_id, beat in beats.items()
    }


def stale_gateways(seen: Mapping[str, BeatObservation], now: float, after_s: float) -> set[str]:
    """Those whose count stood still for ``after_s``."""
    return {gateway_id for gateway_id, one in seen.items() if now - one.at >= after_s}


class Heartbeat:
    """This process's row in the gateways table."""

    def __init__(self, database: Database, gateway_id: str) -> None:
        self._database = database
        self.gateway_id = gateway_id

    async def beat(self) -> None:
        """Counts up; the first beat makes the row, and must come before the first request is opened."""
        first = self._database.insert(gateways).values(gateway_id=self.gateway_id, beat=1)
        async with self._database.write() as connection:
            await connection.execute(
                first.on_conflict_do_update(index_elements=["gateway_id"], set_={"beat": gateways.c.beat + 1})
            )

    async def leave(self) -> None:
        """Takes the row away: there is nothing to watch any more."""
        await delete_gateways(self._database, [self.gateway_id])

    async def beats(self) -> dict[str, int]:
        """The counts of all gateways."""
        async with self._database.read() as connection:
            rows = await connection.execute(select(gateways.c.gateway_id, gateways.c.beat))
            return {row.gateway_id: row.beat for row in rows}


async def delete_gateways(database: Database, gateway_ids: Iterable[str]) -> None:
    """Deletes rows of gateways that are gone and left nothing unsettled."""
    async with database.write() as connection:
        await connection.execute(delete(gateways).where(gateways.c.gateway_id.in_(list(gateway_ids))))
