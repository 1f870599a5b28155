"""A disk that takes no more, without privileges: the system refuses files of this process beyond a size."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """Within the block, a write that would make a file longer fails, as on a full disk (with EFBIG, for ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
