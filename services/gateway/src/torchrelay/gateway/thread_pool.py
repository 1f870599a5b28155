"""Worker threads that do not preempt the event loop."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


def batch_executor(num_threads: int, name: str) -> ThreadPoolExecutor:
    """An executor whose threads run under SCHED_BATCH: waking one never preempts the thread that woke it."""
    # The event loop still holds the GIL when it wakes a thread. A thread that preempted it would block at once on the
    # GIL: two context switches for nothing.
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_set_batch_priority)


def _set_batch_priority() -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # some sandboxes forbid it; the threads then keep normal priority
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: this thread only
