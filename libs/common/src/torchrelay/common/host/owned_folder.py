"""A folder for temporary files that is removed with its owner, or by a later process if the owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from weakref import finalize


class OwnedFolder:
    """A new folder in ``parent``, locked and later removed by this object."""

    def __init__(self, prefix: str, parent: Path) -> None:
        while (descriptor := _locked(path := Path(tempfile.mkdtemp(prefix=prefix, dir=parent)))) is None:
            pass
        self.path = path
        finalize(self, _remove, path, descriptor)


def _locked(path: Path) -> int | None:
    """The descriptor that holds the lock; None: another process has taken the new folder for a stale one."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if path.exists():
        return descriptor
    os.close(descriptor)
    return None


def _remove(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def remove_stale_folders(prefix: str, parent: Path) -> None:
    """Removes folders that killed processes of this host have left behind."""
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a process has it
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
