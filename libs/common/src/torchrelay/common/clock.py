"""The wall clock, in the unit every message and table uses."""

from __future__ import annotations

import time


def now_unix_us() -> int:
    """Microseconds since the Unix epoch, by this machine's clock."""
    return time.time_ns() // 1000
