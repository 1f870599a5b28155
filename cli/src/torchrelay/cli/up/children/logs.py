"""Bounded logs: two files per child, of little more than a limit each.

Children append to an open file, which cannot be replaced while they run: it is copied and truncated. Lines written in
between are lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

CHECK_EVERY_S = 10.0


def rotated_path(log: Path) -> Path:
    """The file with older lines: ``gateway.log.1``."""
    return log.with_name(f"{log.name}.1")


def rotate(log: Path) -> None:
    """Keeps the last run's log beside the new one."""
    if log.exists() and log.stat().st_size:
        log.replace(rotated_path(log))


def truncate_if_long(log: Path, max_bytes: int, *, is_copied: bool = True) -> None:
    """Truncates a long log while it is written to, even if the copy cannot be made."""
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    try:
        if is_copied:
            shutil.copyfile(log, rotated_path(log))
    except OSError:  # a full disk: space is worth more than old lines
        rotated_path(log).unlink(missing_ok=True)
    with log.open("r+b") as file:
        file.truncate()
