"""Makes glibc return freed memory, for processes that should stay small."""

from __future__ import annotations

import asyncio
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
# Setting it stops glibc from raising it. It is above the pieces of an upload: each would be mapped and cleared anew,
# which took 40 % of the gateway's time.
_LARGE_BYTES = 1 << 20


def keep_heap_small() -> None:
    """Uses one heap for all threads and returns large blocks at once. Call before threads start; no-op without glibc.

    By default threads have heaps of their own, and blocks up to the largest one ever freed are kept: loading a
    tokenizer then peaks 7 MB higher.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from musl
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def trim_heap() -> bool:
    """Returns free memory to the system at once; False without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # absent from musl
    if trim is not None:
        trim(0)
    return trim is not None


async def return_free_memory(every_s: float = 2.0) -> None:
    """Returns free memory between blocks in use, which glibc keeps: after a burst this may be most of the burst.

    Runs until it is cancelled; ends without glibc. It takes 50 us when there is little, 10 ms for 100 MB.
    """
    can_trim = True
    while can_trim:
        await asyncio.sleep(every_s)
        can_trim = trim_heap()
