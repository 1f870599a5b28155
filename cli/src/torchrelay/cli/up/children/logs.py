"""The logs of an install, bounded: two files for each child, of ``MAX_LOG_BYTES`` and a little at most.

The children write to the file they were given at their start, by appending, so it cannot be taken away from them while
they run: it is copied and emptied. Lines written between the two are lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

MAX_LOG_BYTES = 32 << 20
CHECK_EVERY_S = 10.0


def rotated_path(log: Path) -> Path:
    """Where the lines before those in ``log`` are: ``gateway.log.1``."""
    return log.with_name(f"{log.name}.1")


def rotate(log: Path) -> None:
    """A run of the platform begins: the last run's log is kept beside the new one."""
    if log.exists() and log.stat().st_size:
        log.replace(rotated_path(log))


def truncate_if_long(log: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Begins a log anew that has become too long, under whoever writes to it; where it cannot be copied, just so."""
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    try:
        shutil.copyfile(log, rotated_path(log))
    except OSError:  # on a full disk its room is worth more than what it says, and the platform goes on
        rotated_path(log).unlink(missing_ok=True)
    with log.open("r+b") as file:
        file.truncate()
