"""The device that this machine's CPU is: its rates, measured in a tenth of a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from torchrelay.modelspec.sizing.devices import Device

NAME: Final = "this_machine"
_MATRIX_BYTES: Final = 160 << 20  # more than the caches of most CPUs
_SIDE: Final = 768
_TRIES: Final = 8  # the best counts: the first faults pages in and starts the threads, and others may use the cores
# The products below attain their rates already; those of a model, which are smaller and of bf16, attain less.
_SHARE: Final = 0.8
# Of a CPU that multiplies bf16: two products where fp32 has one. AMX has more, which only large products attain.
_BF16_OVER_FP32: Final = 2
_STEP_OVERHEAD_S: Final = 0.001  # no kernels are launched


def this_machine() -> Device:
    """The CPU as a device. Its price is unknown."""
    import numpy as np  # takes a while to import

    matrix = np.ones((_MATRIX_BYTES // 4 // 4096, 4096), np.float32)
    vector, square = np.ones(4096, np.float32), np.ones((_SIDE, _SIDE), np.float32)
    flops = 2 * _SIDE**3 / _least_s(lambda: square @ square) * (_BF16_OVER_FP32 if _has_bf16() else 1)
    return Device(
        name=NAME,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bytes_per_s=_MATRIX_BYTES / _least_s(lambda: matrix @ vector),
        flops=flops,
        flops_8bit=flops,
        link_bytes_per_s=0,
        bandwidth_share=_SHARE,
        compute_share=_SHARE,
        step_overhead_s=_STEP_OVERHEAD_S,
        origin="measured",
    )


def _has_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself; others widen it to fp32."""
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False


def _least_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
