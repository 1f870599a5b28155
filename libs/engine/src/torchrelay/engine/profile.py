"""Where the time of a step goes.

A stopwatch runs on each thread that computes. At any moment it counts for one share, so the shares of a step add up to
its duration, and whoever does something of another kind for a while says so:

    before = enter(Share.MEMORY)
    keys = plane.index_select(0, slots)
    enter(before)

This costs a third of a microsecond in a loop, and two amid everything else a step does. On a GPU only the host's time
is seen: a step waits for the device once, under ``COMPUTE``.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from time import perf_counter

from torchrelay.engine.core import StepProfile


class Activity(IntEnum):
    """What time is spent on."""

    NOTHING = 0  # between steps; not counted
    COMPUTE = 1  # layers, head, attention: all that has no name of its own
    MEMORY = 2  # copies that computing needs: KV gathered from pages
    KV_TRANSFER = 3  # KV copied out for another worker, or written into pages from one
    IO_WAIT = 4  # a layer's weights are not there yet
    SCHEDULING = 5  # choosing and laying out the batch, sampling, moving sequences on


_BLANK = [0.0] * len(Activity)


class _Stopwatch:
    """One thread's."""

    __slots__ = ("seconds", "share", "since")

    def __init__(self) -> None:
        self.share, self.since = Activity.NOTHING, 0.0
        self.seconds = _BLANK.copy()


class _Local(threading.local):
    def __init__(self) -> None:
        self.stopwatch = _Stopwatch()


_local = _Local()


def enter(share: Activity) -> Activity:
    """From now on this thread's time counts for ``share``; gives what it counted for before."""
    now, stopwatch = perf_counter(), _local.stopwatch
    before = stopwatch.share
    stopwatch.seconds[before] += now - stopwatch.since
    stopwatch.share, stopwatch.since = share, now
    return before


def take() -> StepProfile:
    """What was counted on this thread since the last call; nothing is counted from here on."""
    enter(Activity.NOTHING)
    stopwatch = _local.stopwatch
    _, *shares = stopwatch.seconds
    stopwatch.seconds = _BLANK.copy()
    return StepProfile(*shares)
