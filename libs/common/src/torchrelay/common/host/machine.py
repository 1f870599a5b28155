"""The resources of this machine, and checks that a request for them fits."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.quantities import format_bytes, format_count

SHARED_MEMORY = Path("/dev/shm")
_RESERVED_SHARED_BYTES = 4 << 20
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# Limit, use, and the figure of page cache that can be given up: of version 2 and of version 1.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


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


def available_cores(cgroup: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> int:
    """Cores that this process may use: what its affinity allows, or the least CPU limit of its cgroups if less."""
    limits = [len(os.sched_getaffinity(0))]
    for group in _groups("cpu", cgroup, own):
        with suppress(OSError, ValueError):  # not of this version, or without a limit ("max")
            limit_us, period_us = map(int, (group / "cpu.max").read_text().split())
            limits.append(math.ceil(limit_us / period_us))
        with suppress(OSError):
            limit_us, period_us = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            limits += [math.ceil(limit_us / period_us)] if limit_us > 0 else []
    return min(limits)


def _groups(controller: str, cgroup: Path, own: Path) -> Iterator[Path]:
    """The cgroups, of version 2 or 1, that may limit this process, from its own up to the root.

    A container may see its own as the root; a batch job or a unit of systemd has one below it.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, below = cgroup / controller if controllers else cgroup, Path(path.lstrip("/"))
        yield from (root / folder for folder in (below, *below.parents))


def shared_digest(*folders: Path) -> str:
    """A digest of what the programs of a machine share in these folders. A batch job may have a ``/tmp`` and a
    ``/dev/shm`` of its own: then it shares no store with the other jobs of its machine.
    """
    places = [(status.st_dev, status.st_ino) for status in map(os.stat, folders)]
    return hashlib.sha256(repr(places).encode()).hexdigest()[:8]


def available_shared_bytes(folder: Path) -> int:
    """Bytes that an arena may take of the file system of ``folder``; processes share small files in the rest."""
    return max(shutil.disk_usage(folder).free - _RESERVED_SHARED_BYTES, 0)


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> int | None:
    """Memory that can be taken without swapping, page cache included: the machine's, or the least of its cgroups'.

    None where the system does not say.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for group in _groups("memory", cgroup, own):
        for limit, used, cached in _MEMORY_FILES:
            with suppress(OSError, ValueError):  # not of this version, or without a limit ("max")
                free_bytes = int((group / limit).read_text()) - int((group / used).read_text())
                figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                available.append(max(free_bytes + int(figures.get(cached, 0)), 0))
    return min(available, default=None)


def check_threads(num_threads: int, machine: Machine) -> None:
    """Raises ``InvalidRequest`` for more threads than cores."""
    if num_threads > machine.num_cores:
        cores = format_count(machine.num_cores, "core")
        raise InvalidRequest(f"{num_threads} threads are asked for and this machine has {cores}", field="threads")


def check_kv_pools(num_bytes: int, available_bytes: int | None, memory: str = "memory") -> None:
    """Raises ``InvalidRequest`` for KV pools of more memory than is available."""
    if available_bytes is not None and num_bytes > available_bytes:
        available = format_bytes(available_bytes)
        message = f"{format_bytes(num_bytes)} are asked for KV and {available} of {memory} are available"
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
