"""Threads that work for the event loop, and do not take its core from it."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


def batch_executor(num_threads: int, name: str) -> ThreadPoolExecutor:
    """An executor whose threads wait for a free core when they are woken.

    The loop wakes them and goes on, with the interpreter's lock that they need first. A thread that took the loop's
    core would only find that out and give it back: two switches for nothing.
    """
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_set_batch_priority)


def _set_batch_priority() -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # some sandboxes forbid it; then they work as any other thread
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: this thread alone
