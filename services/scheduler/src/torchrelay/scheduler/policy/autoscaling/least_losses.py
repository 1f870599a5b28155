"""The least that each version loses with a slot, so that a search for a slot computes the exact losses of few versions.

A bound is computed when its version is evaluated, and unknown once the version's instances change or the bound is old.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torchrelay.scheduler.policy.autoscaling.price import num_lost
from torchrelay.scheduler.policy.types import BOTH, Instance

VALID_S = 2.0  # versions are evaluated more often, if there are not thousands


class _Bound(NamedTuple):
    num_lost: float
    version_id: str


class _Known(NamedTuple):
    bound: _Bound
    is_whole: bool
    arrivals_per_s: float  # per instance
    target_s: float
    until: float


class LeastLosses:
    """Versions by the late requests that each loses at least if one of its slots is gone for ``away_s``.

    A version is whole if it has several instances and each plays both roles: without one, it serves as before.
    """

    def __init__(self, away_s: float) -> None:
        self._away_s = away_s
        self._known: dict[str, _Known] = {}  # the next to expire first
        self._unknown: dict[str, None] = {}
        self._split: dict[str, None] = {}  # known versions with an instance that does not play both roles
        self._all: list[_Bound] = []  # of the known versions, in order
        self._whole: list[_Bound] = []

    def note(
        self, version_id: str, instances: Sequence[Instance], arrivals_per_s: float, target_s: float, now: float
    ) -> None:
        """Stores a bound. ``arrivals_per_s``: the least that is expected until ``VALID_S`` from now."""
        self._forget(version_id)
        per_instance = arrivals_per_s / len(instances)
        bound = _Bound(num_lost(per_instance, self._away_s, target_s), version_id)
        plays_both = all(instance.roles >= BOTH and instance.target_roles >= BOTH for instance in instances)
        is_whole = plays_both and len(instances) > 1
        self._known[version_id] = _Known(bound, is_whole, per_instance, target_s, now + VALID_S)
        insort(self._all, bound)
        if is_whole:
            insort(self._whole, bound)
        if not plays_both:
            self._split[version_id] = None

    def changed(self, version_id: str, *, has_instances: bool) -> None:
        """Forgets the bound of a version whose instances changed."""
        self._forget(version_id)
        if has_instances:
            self._unknown[version_id] = None

    def _forget(self, version_id: str) -> None:
        self._unknown.pop(version_id, None)
        self._split.pop(version_id, None)
        if (known := self._known.pop(version_id, None)) is not None:
            del self._all[bisect_left(self._all, known.bound)]
            if known.is_whole:
                del self._whole[bisect_left(self._whole, known.bound)]

    def _expire(self, now: float) -> None:
        while self._known and (first := next(iter(self._known.values()))).until < now:
            self.changed(first.bound.version_id, has_instances=True)

    def of(self, version_id: str, away_s: float, now: float) -> float:
        """The least that the version loses with a slot that is gone for ``away_s``."""
        known = self._known.get(version_id)
        if known is None or known.until < now:
            return 0.0
        return num_lost(known.arrivals_per_s, away_s, known.target_s)

    def up_to(self, num_gained: float, now: float) -> Collection[str]:
        """The versions that may lose no more than ``num_gained``."""
        self._expire(now)
        return [*self._unknown, *(bound.version_id for bound in _up_to(self._all, num_gained))]

    def whole_up_to(self, num_gained: float, now: float) -> Sequence[tuple[float, str]]:
        """The least losses of whole versions up to ``num_gained``, in order."""
        self._expire(now)
        return _up_to(self._whole, num_gained)

    def others(self, now: float) -> Collection[str]:
        """Versions that play the roles apart, and those that are unknown."""
        self._expire(now)
        return [*self._unknown, *self._split]

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert not self._unknown.keys() & self._known.keys() and self._split.keys() <= self._known.keys()
        assert self._all == sorted(known.bound for known in self._known.values())
        assert self._whole == sorted(known.bound for known in self._known.values() if known.is_whole)


def _up_to(bounds: Sequence[_Bound], num_gained: float) -> Sequence[_Bound]:
    return bounds[: bisect_right(bounds, num_gained, key=lambda bound: bound.num_lost)]
