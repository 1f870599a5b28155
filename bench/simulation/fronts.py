"""A system's front: the least device time by what it buys, interpolated between the system's settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """``device_s`` and what it buys, such as the share of late requests; less of both is better."""

    device_s: float
    value: float


class Front:
    """The lower convex hull of the points: a mixture of two settings over time lies on the line between them."""

    def __init__(self, points: Iterable[Point]) -> None:
        hull: list[Point] = []
        for point in sorted(points):
            if hull and point.value >= hull[-1].value:
                continue
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        self.points: Sequence[Point] = hull

    @property
    def least_value(self) -> float:
        return self.points[-1].value

    def device_s(self, value: float) -> float:
        """Least device time for ``value``; infinite if no setting gives so little."""
        if value < self.least_value:
            return math.inf
        later = next(number for number, point in enumerate(self.points) if point.value <= value)
        if not later:
            return self.points[0].device_s
        before, after = self.points[later - 1 : later + 1]
        share = (before.value - value) / (before.value - after.value)
        return before.device_s + share * (after.device_s - before.device_s)

    def value(self, device_s: float) -> float:
        """Least value for at most ``device_s``; that of the cheapest setting if none takes so little."""
        later = next((number for number, point in enumerate(self.points) if point.device_s >= device_s), None)
        if later is None:
            return self.least_value
        if not later:
            return self.points[0].value
        before, after = self.points[later - 1 : later + 1]
        share = (device_s - before.device_s) / (after.device_s - before.device_s)
        return before.value + share * (after.value - before.value)


def _is_above(first: Point, middle: Point, last: Point) -> bool:
    """Whether ``middle`` lies on or above the line from ``first`` to ``last``."""
    slope = (last.value - first.value) / (last.device_s - first.device_s)
    return middle.value >= first.value + slope * (middle.device_s - first.device_s)


def device_ratio(mine: Front, other: Front) -> float:
    """Device time of ``mine`` over that of ``other`` for equal values: the geometric mean over the settings of
    ``other`` whose value ``mine`` reaches, or at the least value of ``mine`` if it reaches none.
    """
    values = [point.value for point in other.points if point.value >= mine.least_value] or [mine.least_value]
    return geometric_mean(mine.device_s(value) / other.device_s(value) for value in values)


def value_ratio(mine: Front, other: Front) -> float:
    """Value of ``mine`` over that of ``other`` for equal device times: the geometric mean over the settings of
    ``other``.
    """
    return geometric_mean(mine.value(point.device_s) / point.value for point in other.points if point.value > 0)


def geometric_mean(ratios: Iterable[float]) -> float:
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan
