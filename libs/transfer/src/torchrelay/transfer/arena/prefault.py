"""Prefaults memory without holding the interpreter's lock.

On a virtual machine the first touch of pages costs about 2 s per GB; afterwards they are fast.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from torchrelay.transfer.manifest import PAGE_BYTES

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
_libc = ctypes.CDLL(None, use_errno=True)


def prefault(file: int, mapping: mmap.mmap, begin: int, num_bytes: int) -> None:
    """Allocates zeroed pages for a range of a shared file and maps them into this process.

    The range must be unwritten. Raises ``OSError`` (ENOSPC) when the file system is full; without the allocation, the
    first touch would kill the process with SIGBUS.
    """
    os.posix_fallocate(file, begin, num_bytes)
    anchor = (ctypes.c_char * num_bytes).from_buffer(mapping, begin)
    address = ctypes.c_void_p(ctypes.addressof(anchor))
    if _libc.madvise(address, ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE) != 0:
        # An older kernel: touch each page.
        memoryview(anchor).cast("B")[::PAGE_BYTES] = bytes(-(-num_bytes // PAGE_BYTES))
