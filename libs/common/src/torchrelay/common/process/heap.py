"""glibc's allocator, told to give memory back: for processes that are to stay small."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGE_BYTES = 128 << 10  # glibc's own at first; said here, it stays what it is


def keep_heap_small() -> None:
    """One heap for all threads, and large blocks go back to the system at once. To be called before threads start.

    By default glibc gives threads heaps of their own, and keeps blocks as large as the largest that was ever freed: the
    peak of loading a tokenizer is then 7 MB higher. Where there is no glibc this does nothing.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from musl
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
