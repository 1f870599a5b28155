"""The CPU time of a step of the gateway's event loop, in a test's process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_STEP_S = 0.2


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
    """Asserts that the block takes less than ``MAX_STEP_S`` of CPU."""
    with without_collections():
        begin_s = time.thread_time()
        yield
        took_s = time.thread_time() - begin_s
        assert took_s < MAX_STEP_S, f"{took_s:.3f} s"
