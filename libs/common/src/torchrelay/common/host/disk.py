"""Disks that are full, told apart from disks that fail."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from torchrelay.common.errors import DiskFull, Unavailable
from torchrelay.common.quantities import format_bytes

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def is_no_space(error: OSError) -> bool:
    return error.errno in _NO_SPACE


def free_bytes(path: Path) -> int:
    """Free bytes for this user on the disk of ``path``, which need not exist yet. Raises ``OSError``."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def disk_full(folder: Path) -> DiskFull:
    """The disk of ``folder`` is full."""
    return DiskFull(f"the disk of {folder} is full ({_free(folder)}); it works again once space is freed there")


def write_error(error: OSError, what: str, folder: Path) -> Unavailable:
    """``what`` could not be written below ``folder``: because its disk is full, or for another reason."""
    if is_no_space(error):
        return DiskFull(f"{what}: {disk_full(folder).message}")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return Unavailable(f"{what}: the disk of {folder} fails: {reason}")


def _free(folder: Path) -> str:
    try:
        return f"{format_bytes(free_bytes(folder))} free"
    except OSError as error:
        return f"it does not say how full: {error.strerror}"
