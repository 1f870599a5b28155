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
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        finalize(self, _remove, self.path, descriptor)


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
