"""Locks on byte ranges of a file, seen by all processes of the host whatever their pid namespaces.

Open file description locks of Linux, fcntl_locking(2): the kernel releases them with the last descriptor of the open
file, also when the process is killed. A mapping by ``mmap.mmap`` keeps its descriptor, and so the lock.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

# struct flock: type, whence, begin, number of bytes, pid (0 in requests)
_FLOCK: Final = struct.Struct("hhqqi0q")


def share_range(file: int, begin: int, num_bytes: int) -> None:
    """Locks a range that others may share. Raises ``BlockingIOError`` when another open file owns a part of it."""
    _set(file, fcntl.F_RDLCK, begin, num_bytes)


def own_range(file: int, begin: int, num_bytes: int) -> None:
    """Locks a range alone. Raises ``BlockingIOError`` when another open file has locked a part of it."""
    _set(file, fcntl.F_WRLCK, begin, num_bytes)


def is_range_locked(file: int, begin: int, num_bytes: int) -> bool:
    """Whether another open file has locked a part of the range."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, num_bytes, 0)
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, request))
    return bool(kind != fcntl.F_UNLCK)


def _set(file: int, kind: int, begin: int, num_bytes: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, begin, num_bytes, 0))
