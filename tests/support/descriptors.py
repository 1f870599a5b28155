"""The descriptors that this process holds, to see that nothing stays open."""

from __future__ import annotations

import os


def open_descriptors() -> set[tuple[str, str]]:
    """The number and the target of each. What a test has left open is the difference to an earlier set: other
    threads, and what earlier tests left to the garbage collector, may close theirs in between.
    """
    descriptors = set[tuple[str, str]]()
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:  # closed meanwhile, as that of the listing is
            continue
    return descriptors
