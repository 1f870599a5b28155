"""The arena's file: owned by one process at a time, replaced when its size or version differs."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from torchrelay.common.errors import Conflict, NotFound
from torchrelay.transfer.arena.slab_table import is_table_of


def open_locked(path: Path, capacity_bytes: int) -> int:
    """A locked descriptor of the file at ``path``: new and empty, or an arena of this size and version.

    Raises ``Conflict`` when another process holds it, ``NotFound`` when its folder does not exist.
    """
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError as error:
            raise NotFound(f"the arena's folder {path.parent} does not exist", field="arena_path") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise Conflict(f"the arena {path} belongs to another running process", field="arena_path") from error
        if is_at(path, file):
            num_bytes = os.fstat(file).st_size
            if num_bytes == 0 or (num_bytes == capacity_bytes and is_table_of(os.pread(file, 64, 0), capacity_bytes)):
                return file
            path.unlink()  # processes that map the old file keep it
        os.close(file)


def capacity_left_at(path: Path) -> int | None:
    """The capacity of the arena that an earlier process left; None: there is no arena to reopen."""
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return num_bytes if is_table_of(file.read(64), num_bytes) else None
    except FileNotFoundError:
        return None


def is_at(path: Path, file: int) -> bool:
    """Whether the path still names this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
