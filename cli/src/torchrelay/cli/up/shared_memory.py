"""Shared memory that killed platforms have left behind.

While an `up` runs it locks a file beside the arena that names its home. A killed `up` leaves the file, unlocked: only
then is it certain that nobody starts the arena's param-store again.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchrelay.common.host.machine import SHARED_MEMORY

_ARENA = re.compile(r"torchrelay-[0-9a-f]{12}")
_MAX_PATH_BYTES = 4096
_UNKNOWN = "an unknown home"


@dataclass(frozen=True, slots=True)
class LeftArena:
    """An arena whose platform was killed, and the home of that platform."""

    path: Path
    num_bytes: int
    home: str


@contextmanager
def arena_owned(arena: Path, home: Path) -> Iterator[None]:
    """Marks the arena as that of a running `up`, unless it lies in the home for lack of shared memory."""
    if arena.parent != SHARED_MEMORY:
        yield
        return
    path = _lock_path(arena)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)  # waits while another `up` looks at what is left
        with suppress(OSError):  # without space the home stays unknown
            os.ftruncate(file, 0)
            os.pwrite(file, os.fsencode(home), 0)
        yield
    finally:
        if not arena.exists():
            path.unlink(missing_ok=True)
        os.close(file)


def left_arenas(own: Path, folder: Path = SHARED_MEMORY) -> list[LeftArena]:
    """The arenas in ``folder`` without a platform, except this one's ``own``, which it uses again."""
    candidates = [path for path in folder.iterdir() if _ARENA.fullmatch(path.name) and path != own]
    return [left for path in sorted(candidates) if (left := _left(path)) is not None]


def _left(arena: Path) -> LeftArena | None:
    """None: its platform or a process that maps it may run, or this user may not look."""
    try:
        # Whoever starts the platform now waits for the lock, and so does its param-store.
        with _lock_path(arena).open("rb") as owner, arena.open("rb") as file:
            for each in (owner, file):
                fcntl.flock(each, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            if _is_mapped(status):
                return None
            return LeftArena(arena, status.st_blocks * 512, os.fsdecode(owner.read(_MAX_PATH_BYTES)) or _UNKNOWN)
    except OSError:
        return None


def _is_mapped(status: os.stat_result) -> bool:
    """Whether a process maps the file, as far as this process may see."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user, who cannot map the file
            for line in (process / "maps").read_text(errors="replace").splitlines():
                if line.split(maxsplit=5)[3:5] == [device, str(status.st_ino)]:  # range, permissions, offset, device
                    return True
    return False


def _lock_path(arena: Path) -> Path:
    return arena.with_name(f"{arena.name}.up")
