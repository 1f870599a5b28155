"""How far off a `Retry-After` was: both to be refused once more, and to be away while there is a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """A client was told to come back after ``told_s``, and could have come after ``actual_s``."""

    told_s: float
    actual_s: float

    def factor(self, told_s: float) -> float:
        """How far off this would have been, either way."""
        return max(self.actual_s / told_s, told_s / self.actual_s)


def refusals_of(clients: Sequence[Sequence[dict[str, Any]]], num_free: Sequence[tuple[float, int]]) -> list[Refusal]:
    """By their times. ``clients``: the tries of each, the last accepted; ``num_free``: places of the queue over time.

    A client could have come when there was a place for it and for all that were refused before it and are still away.
    """
    refused = sorted((tries for tries in clients if len(tries) > 1), key=lambda tries: tries[0]["ended_at"])
    place_at = [0.0] * len(refused)
    for now, num in num_free:
        away = [i for i, tries in enumerate(refused) if tries[0]["ended_at"] <= now < tries[-1]["sent_at"]]
        for i in away[: max(num, 0)]:
            place_at[i] = place_at[i] or now
    found = []
    for tries, had_place_at in zip(refused, place_at, strict=True):
        accepted_at = tries[-1]["sent_at"]
        for each in tries[:-1]:
            could_at = min(accepted_at, had_place_at) if had_place_at > each["ended_at"] else accepted_at
            found.append((each["ended_at"], Refusal(each["retry_after_s"], could_at - each["ended_at"])))
    return [refusal for _, refusal in sorted(found, key=lambda one: one[0])]
