"""The descriptors that this process holds, to see that nothing stays open."""

from __future__ import annotations

import gc
import os


def open_descriptors(target: str = "") -> set[tuple[str, str]]:
    """The number and the target of each whose target has ``target`` in it. What a test has left open is the difference
    to an earlier set: what earlier tests left to the garbage collector may be closed in between. What another thread
    opens meanwhile is in it too, as gRPC's own descriptors are.
    """
    gc.collect()
    descriptors = set[tuple[str, str]]()
    for number in os.listdir("/proc/self/fd"):
        try:
            opened = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # closed meanwhile, as that of the listing is
            continue
        if target in opened:
            descriptors.add((number, opened))
    return descriptors
