"""A real file system of a given size, which tests can fill to the last byte. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_BALLAST = "ballast"


class SmallDisk:
    """A mounted file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def free_bytes(self) -> int:
        state = os.statvfs(self.folder)
        return state.f_bavail * state.f_frsize

    def fill(self, num_free: int = 0) -> None:
        """Leaves ``num_free`` bytes, rounded down to whole pages; without it, not one."""
        with (self.folder / _BALLAST).open("ab", buffering=0) as ballast, suppress(OSError):
            while self.free_bytes > num_free:
                ballast.write(bytes(min(max(self.free_bytes - num_free, 1), 1 << 20)))

    def free(self) -> None:
        """Removes what ``fill`` wrote."""
        (self.folder / _BALLAST).unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """A file system of this size, mounted on ``folder`` for the block."""
    if os.geteuid() != 0:
        raise RuntimeError("tests of small disks mount file systems: run them as root, or deselect them: -m 'not lab'")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", str(folder)), check=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)
