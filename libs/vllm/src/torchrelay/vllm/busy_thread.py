"""The progress of a thread that runs foreign code for long: it advances as long as it computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOK_S = 1.0
_LEAST_COMPUTED_S = 0.01


@contextmanager
def reporting_cpu_time(on_advance: Callable[[], None], look_s: float = _LOOK_S) -> Iterator[None]:
    """Calls ``on_advance`` on another thread, every ``look_s`` in which the calling thread has computed.

    A thread that waits for a lock or a child process does not advance.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident())
    ended = threading.Event()

    def watch() -> None:
        seen_s = time.clock_gettime(clock)
        while not ended.wait(look_s):
            now_s = time.clock_gettime(clock)
            if now_s - seen_s >= _LEAST_COMPUTED_S:
                on_advance()
            seen_s = now_s

    watcher = threading.Thread(target=watch, name="vllm-start", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
