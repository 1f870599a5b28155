"""A thread's stay in another network namespace."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Move the calling thread to ``namespace`` (its name in `ip netns`) for the block. Raises OSError."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(home)
    finally:
        os.close(home)


def _enter(namespace_fd: int) -> None:
    if _LIBC.setns(namespace_fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
