"""Files that appear complete or not at all, and survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file atomically: readers see the old content or the new."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Writes all of ``data`` at the descriptor's position; a single system call may write less."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(file, remaining) :]


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
