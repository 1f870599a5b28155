"""A device's rate of reading its memory, measured when a worker starts."""

from __future__ import annotations

import time

import torch

_PROBE_S = 0.05


def measure_read_rate(memory: torch.Tensor) -> float:
    """Bytes per second of the fastest of the passes over ``memory``, of bytes, that fit into 50 ms; at least two.

    NOTE: a memory that the caches of a CPU hold is read faster than a large model.
    """
    numbers = memory.view(torch.float32)
    fastest_s, end = float("inf"), time.perf_counter() + _PROBE_S
    for number in range(1000):
        begin = time.perf_counter()
        numbers.sum()
        if memory.device.type == "cuda":
            torch.cuda.synchronize(memory.device)
        now = time.perf_counter()
        if number:  # the first pass may compile a kernel, or start threads
            fastest_s = min(fastest_s, now - begin)
            if now >= end:
                break
    return memory.numel() / fastest_s
