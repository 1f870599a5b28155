"""A worker's memory by kind, as counted by the kernel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.processes import memory_bytes

SETTLED_S = 1.4  # longer than the delay before a worker copies weights, and than the copy of a layer


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Bytes: ``private`` memory, and ``arena_share``, the proportional share of the arena (PSS)."""

    private: int
    arena_share: int


def worker_memory(pid: int, arena: str) -> WorkerMemory:
    """Memory of a process. ``arena``: prefix of the arena file's path. Raises ``RuntimeError`` if it is not mapped."""
    private = share = 0
    is_arena = is_mapped = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name and " " in line.partition(":")[0]:  # "7f00-7f01 r--s 00000000 fe:00 12  /path"
            is_arena = f" {arena}" in line
            is_mapped |= is_arena
        elif name in ("Private_Clean", "Private_Dirty"):
            private += int(rest.split()[0]) * 1024
        elif name == "Pss" and is_arena:
            share += int(rest.split()[0]) * 1024
    if not is_mapped:
        raise RuntimeError(f"process {pid} has not mapped {arena}")
    return WorkerMemory(private, share)


def await_settled(pids: Sequence[int], timeout_s: float = 60.0) -> None:
    """Waits until the private memory of workers is stable, so that their weights are settled."""
    deadline_s = time.monotonic() + timeout_s
    last, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < SETTLED_S:
        if time.monotonic() > deadline_s:
            raise RuntimeError("the workers' memory kept growing")
        num_bytes = sum(memory_bytes(pid)["RssAnon"] for pid in pids)
        if abs(num_bytes - last) > 1 << 20:
            last, since_s = num_bytes, time.monotonic()
        time.sleep(0.1)
