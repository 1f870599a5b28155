"""Errors of `Retry-After`: too short leads to another refusal, too long leaves a free place unused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """A client that was told to return after ``told_s`` and could have returned after ``actual_s``."""

    told_s: float
    actual_s: float

    def factor(self, told_s: float) -> float:
        """Error factor of ``told_s``, at least 1."""
        return max(self.actual_s / told_s, told_s / self.actual_s)


def refusals_of(clients: Sequence[Sequence[dict[str, Any]]], num_free: Sequence[tuple[float, int]]) -> list[Refusal]:
    """Refusals in order of time. ``clients``: tries of each client, the last accepted; ``num_free``: free places of the
    queue over time.

    A client could have returned when there was a place for it and for all clients that were refused before it and have
    not returned.
    """
    refused = sorted((tries for tries in clients if len(tries) > 1), key=lambda tries: tries[0]["ended_at"])
    place_at = [0.0] * len(refused)
    for now, num in num_free:
        away = [i for i, tries in enumerate(refused) if tries[0]["ended_at"] <= now < tries[-1]["sent_at"]]
        for i in away[: max(num, 0)]:
            place_at[i] = place_at[i] or now
    refusals = []
    for tries, had_place_at in zip(refused, place_at, strict=True):
        accepted_at = tries[-1]["sent_at"]
        for each in tries[:-1]:
            could_at = min(accepted_at, had_place_at) if had_place_at > each["ended_at"] else accepted_at
            refusals.append((each["ended_at"], Refusal(each["retry_after_s"], could_at - each["ended_at"])))
    return [refusal for _, refusal in sorted(refusals, key=lambda timed: timed[0])]
