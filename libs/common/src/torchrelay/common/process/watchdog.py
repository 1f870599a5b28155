"""Ends a process that hangs: its supervisor (compose, Kubernetes, systemd) starts it again."""

from __future__ import annotations

import asyncio
import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

BEATS_PER_LIMIT = 10
STDERR = 2  # the descriptor: a thread in C writes to it


@contextmanager
def watched_event_loop(limit_s: float) -> Iterator[None]:
    """Inside the block, a running event loop that does not run for ``limit_s`` ends the process with status 1.

    Before that every thread's stack is written to standard error. 0: no limit. Use it within the event loop.
    """
    if not limit_s:
        yield
        return
    loop = asyncio.get_running_loop()
    next_beat: asyncio.TimerHandle | None = None

    def beat() -> None:
        nonlocal next_beat
        # The limit is kept by a thread of the interpreter in C: it ends the process even if native code holds the GIL.
        faulthandler.dump_traceback_later(limit_s, exit=True, file=STDERR)
        next_beat = loop.call_later(limit_s / BEATS_PER_LIMIT, beat)

    beat()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if next_beat is not None:
            next_beat.cancel()


def end_process() -> NoReturn:
    """Ends this process with status 1, whatever its threads do, and writes their stacks to standard error before."""
    faulthandler.dump_traceback(file=STDERR)
    os._exit(1)
