"""Memory that processes share through a file: mapped so that it can be huge pages, and faulted in ahead of time.

Linux gives files in memory huge pages where an administrator says so (``shmem_enabled``). To ask for them one by one
(MADV_COLLAPSE) made a step 2 % faster, but while an arena grew so the workers beside it stood still for seconds.
All calls leave the interpreter's lock to others.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

from torchrelay.transfer.manifest import PAGE_BYTES

HUGE_BYTES: Final = 2 << 20
# Linux's; not in the mmap module.
_PROT_NONE, _MAP_FIXED = 0, 0x10
_MADV_POPULATE_WRITE = 23
_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(file: int, num_bytes: int, offset: int = 0, writable: bool = False) -> memoryview:
    """A range of a file, mapped until the last view of it is collected.

    The file's huge pages lie on huge pages of this process. Raises ``OSError``.
    """
    room = num_bytes + HUGE_BYTES
    reserved = _map(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    begin = reserved + (offset - reserved) % HUGE_BYTES
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _map(begin, num_bytes, prot, mmap.MAP_SHARED | _MAP_FIXED, file, offset)
    except OSError:
        _libc.munmap(reserved, room)
        raise
    whole = (ctypes.c_ubyte * num_bytes).from_address(begin)
    weakref.finalize(whole, _libc.munmap, reserved, room).atexit = False  # at exit threads may still read
    memory = memoryview(whole).cast("B")
    return memory if writable else memory.toreadonly()


def fault_in(file: int, memory: memoryview, begin: int, num_bytes: int) -> None:
    """Gives the range of a shared file its pages, zeroed, and enters them into this process's page table.

    On a virtual machine the first touch of a page costs about 2 s per GB; memory that was touched once is quick for
    ever after. ``memory`` is the whole file. The range must never have been written. Raises ``OSError`` (ENOSPC) when
    the file system has no room: without that, the first touch would kill the process by SIGBUS.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory, begin))
    os.posix_fallocate(file, begin, num_bytes)
    if _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) != 0:  # before Linux 5.14: touch each page
        memory[begin : begin + num_bytes : PAGE_BYTES] = bytes(-(-num_bytes // PAGE_BYTES))


def _map(address: int | None, num_bytes: int, prot: int, flags: int, file: int, offset: int) -> int:
    found = _libc.mmap(address, num_bytes, prot, flags, file, offset)
    if found == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(found)
