"""The CPU time of a step of the gateway's event loop, in a test's process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")

MAX_STEP_S = 0.2  # where the reference takes at most ``USUAL_REFERENCE_S``
USUAL_REFERENCE_S = 0.05


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps the garbage collector out: in a process that has run thousands of tests, a collection takes longer than the
    step, unlike in a gateway.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def short_step() -> Iterator[None]:
    """Asserts that the block takes less than ``MAX_STEP_S`` of CPU, and in proportion on a slower machine. A shared
    machine may become slower meanwhile, so the reference is measured before and after the block.
    """
    with without_collections():
        before_s = _reference_s()
        begin_s = time.thread_time()
        yield
        took_s = time.thread_time() - begin_s
        slowness = max(before_s / USUAL_REFERENCE_S, _reference_s() / USUAL_REFERENCE_S, 1.0)
        assert took_s < MAX_STEP_S * slowness, f"{took_s:.3f} s, {slowness:.1f} times slower than usual"


def shortest_of_five(step: Callable[[], T]) -> T:
    """Runs a step that can be repeated, and asserts that one run is short: a run that copies tens of megabytes takes
    twice as long while another process fills the memory's bandwidth.
    """
    for _ in range(4):
        with suppress(AssertionError), short_step():
            return step()
    with short_step():
        return step()


def _reference_s() -> float:
    """CPU time of what steps consist of: Python's instructions, and memory that the process has not used before."""
    begin_s = time.thread_time()
    sum(range(500_000))
    fresh = b"".join([b"x" * (1 << 20)] * 32)
    fresh.count(b"y")
    return time.thread_time() - begin_s
