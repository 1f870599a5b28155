"""Measures where the time of a step goes.

Each computing thread has a stopwatch that always counts for exactly one activity, so the activities of a step add up
to its duration. Code that starts another activity announces it:

    before = enter(Activity.MEMORY)
    keys = plane.index_select(0, slots)
    enter(before)

A call takes a third of a microsecond in a loop, two within a step. On a GPU only the host's time is visible: a step
waits for the device once, under ``COMPUTE``.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from time import perf_counter

from torchrelay.engine.core import StepProfile


class Activity(IntEnum):
    """The activities that a thread spends its time on."""

    NOTHING = 0  # between steps; not counted
    COMPUTE = 1  # layers, head, attention: everything not listed below
    MEMORY = 2  # copies for a computation: KV gathered from pages
    KV_TRANSFER = 3  # KV copied out for another worker, or imported into pages
    SCHEDULING = 4  # choosing and laying out the batch, sampling, advancing sequences


_BLANK = [0.0] * len(Activity)


class _Stopwatch:
    __slots__ = ("activity", "seconds", "since")

    def __init__(self) -> None:
        self.activity, self.since = Activity.NOTHING, 0.0
        self.seconds = _BLANK.copy()


class _Local(threading.local):
    def __init__(self) -> None:
        self.stopwatch = _Stopwatch()


_local = _Local()


def enter(activity: Activity) -> Activity:
    """Counts this thread's time for ``activity`` from now on; returns the previous activity."""
    now, stopwatch = perf_counter(), _local.stopwatch
    before = stopwatch.activity
    stopwatch.seconds[before] += now - stopwatch.since
    stopwatch.activity, stopwatch.since = activity, now
    return before


def take() -> StepProfile:
    """Returns this thread's times since the last call, and stops counting."""
    enter(Activity.NOTHING)
    stopwatch = _local.stopwatch
    _, compute_s, memory_s, kv_transfer_s, scheduling_s = stopwatch.seconds
    stopwatch.seconds = _BLANK.copy()
    return StepProfile(compute_s, memory_s, kv_transfer_s, scheduling_s=scheduling_s)
