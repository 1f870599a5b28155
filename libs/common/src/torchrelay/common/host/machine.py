"""The resources of this machine, and checks that a request for them fits."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.quantities import format_bytes, format_count

SHARED_MEMORY = Path("/dev/shm")
_RESERVED_SHARED_BYTES = 4 << 20
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores, and the bytes of memory and of shared memory that are available; None: unknown.

    ``shared_memory``: a folder of the shared memory.
    """

    num_cores: int
    memory_bytes: int | None
    shared_memory_bytes: int | None
    shared_memory: Path = SHARED_MEMORY

    @classmethod
    def here(cls, shared_memory: Path = SHARED_MEMORY) -> Machine:
        """This machine, now."""
        shared = available_shared_bytes(shared_memory) if shared_memory.is_dir() else None
        return cls(available_cores(), available_memory_bytes(), shared, shared_memory)


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: what its affinity allows, or the container's CPU limit if less."""
    num_cores = len(os.sched_getaffinity(0))
    try:
        limit_us, period_us = (cgroup / "cpu.max").read_text().split()
        return min(num_cores, math.ceil(int(limit_us) / int(period_us)))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return num_cores


def available_shared_bytes(folder: Path) -> int:
    """Bytes that an arena may take of the file system of ``folder``; processes share small files in the rest."""
    return max(shutil.disk_usage(folder).free - _RESERVED_SHARED_BYTES, 0)


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that can be taken without swapping, page cache included: the machine's, or the container's if less.

    None where the system does not say.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    try:
        limit_bytes = int((cgroup / "memory.max").read_text())
        used_bytes = int((cgroup / "memory.current").read_text())
        figures = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return min(available, default=None)
    return min(*available, max(limit_bytes - used_bytes + int(figures.get("inactive_file", 0)), 0))


def check_threads(num_threads: int, machine: Machine) -> None:
    """Raises ``InvalidRequest`` for more threads than cores."""
    if num_threads > machine.num_cores:
        cores = format_count(machine.num_cores, "core")
        raise InvalidRequest(f"{num_threads} threads are asked for and this machine has {cores}", field="threads")


def check_kv_pools(num_bytes: int, machine: Machine) -> None:
    """Raises ``InvalidRequest`` for KV pools of more memory than is available."""
    if machine.memory_bytes is not None and num_bytes > machine.memory_bytes:
        available = format_bytes(machine.memory_bytes)
        message = f"{format_bytes(num_bytes)} are asked for KV and {available} of memory are available"
        raise InvalidRequest(message, field="kv_pool_bytes")


def check_arena(num_bytes: int, num_bytes_there: int, machine: Machine) -> None:
    """Raises ``InvalidRequest`` for an arena of more memory than is available.

    ``num_bytes_there``: what an arena left by an earlier process takes already.
    """
    limits = (
        (machine.shared_memory_bytes, f"of {machine.shared_memory} are free"),
        (machine.memory_bytes, "of memory are available"),
    )
    for limit, what in limits:
        if limit is not None and num_bytes > limit + num_bytes_there:
            available = format_bytes(limit + num_bytes_there)
            raise InvalidRequest(
                f"an arena of {format_bytes(num_bytes)} is asked for and {available} {what}", field="arena_bytes"
            )
