"""CPU time and memory of processes from /proc. 1 MB is 10**6 bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MB = 10**6
_SAMPLE_EVERY_S = 0.02
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its children, living and reaped, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S  # utime, stime, and both of reaped children
    return own + sum(cpu_s(child) for child in children(pid))


def children(pid: int) -> list[int]:
    """The process's living children; empty for a process that is gone."""
    pids: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return pids


def memory_bytes(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status by name (VmRSS, RssAnon, ...), in bytes; empty for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def is_forking(child: int, parent: int) -> bool:
    """Whether ``child`` has not yet called exec; until then its memory is its parent's."""
    try:
        return Path(f"/proc/{child}/cmdline").read_bytes() == Path(f"/proc/{parent}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def sampled(sample: Callable[[], None]) -> Iterator[None]:
    """Calls ``sample`` from a thread every 20 ms while the block runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(_SAMPLE_EVERY_S):
            sample()

    thread = threading.Thread(target=run, name="sampler")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
