"""The least that each version loses with a slot, so that a search for a slot computes the exact losses of few versions.

A bound is computed when its version is evaluated, and unknown once the version's instances change or the bound is old.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from typing import NamedTuple

from torchrelay.scheduler.policy.demand.lateness import displaced

VALID_S = 2.0  # versions are evaluated more often, if there are not thousands


class _Bound(NamedTuple):
    num_lost: float
    version_id: str


class LeastLosses:
    """Versions by the late requests that each loses at least if one of its slots is gone for ``away_s``."""

    def __init__(self, away_s: float) -> None:
        self._away_s = away_s
        self._known: dict[str, tuple[_Bound, float]] = {}  # with the end of its validity; the next to expire first
        self._unknown: dict[str, None] = {}
        self._ordered: list[_Bound] = []  # of the known versions

    def note(self, version_id: str, num_instances: int, arrivals_per_s: float, target_s: float, now: float) -> None:
        """Stores a bound. ``arrivals_per_s``: the least that is expected until ``VALID_S`` from now."""
        self._forget(version_id)
        bound = _Bound(displaced(0.0, arrivals_per_s / num_instances, target_s, self._away_s), version_id)
        self._known[version_id] = bound, now + VALID_S
        insort(self._ordered, bound)

    def changed(self, version_id: str, *, has_instances: bool) -> None:
        """Forgets the bound of a version whose instances changed."""
        self._forget(version_id)
        if has_instances:
            self._unknown[version_id] = None

    def _forget(self, version_id: str) -> None:
        self._unknown.pop(version_id, None)
        if (known := self._known.pop(version_id, None)) is not None:
            del self._ordered[bisect_left(self._ordered, known[0])]

    def up_to(self, num_gained: float, now: float) -> Collection[str]:
        """The versions that may lose no more than ``num_gained``."""
        while self._known and (first := next(iter(self._known.values())))[1] < now:
            self.changed(first[0].version_id, has_instances=True)
        end = bisect_right(self._ordered, num_gained, key=lambda bound: bound.num_lost)
        return [*self._unknown, *(bound.version_id for bound in self._ordered[:end])]

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert not self._unknown.keys() & self._known.keys()
        assert self._ordered == sorted(bound for bound, _ in self._known.values())
