"""Time since each load last made progress, in bytes, layers or phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class LoadMark(NamedTuple):
    """Progress mark of a load; any change is progress."""

    accepted: bool
    num_phases: int
    num_layers_ready: int
    num_chunks_verified: int | None  # None: not reported by the store, which is no progress


@dataclass(frozen=True)
class _Reached:
    mark: LoadMark
    at: float


class LoadProgress:
    """The last progress of each load, by instance."""

    def __init__(self) -> None:
        self._reached: dict[str, _Reached] = {}

    def observe(self, instance_id: str, mark: LoadMark, now: float) -> float:
        """Seconds since the load last made progress."""
        before = self._reached.get(instance_id)
        if before is not None and mark.num_chunks_verified is None:
            mark = mark._replace(num_chunks_verified=before.mark.num_chunks_verified)
        if before is None or mark != before.mark:
            before = self._reached[instance_id] = _Reached(mark, now)
        return now - before.at

    def keep(self, instance_ids: set[str]) -> None:
        """Forgets all other loads."""
        for instance_id in self._reached.keys() - instance_ids:
            del self._reached[instance_id]
