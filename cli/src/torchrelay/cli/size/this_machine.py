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
# The best of the tries counts: the first faults pages in and starts the threads, and others may use the cores.
_MIN_TRIES: Final = 3
_TRIES_S: Final = 0.1
# The products below attain their rates already; those of a model, which are smaller and of bf16, attain less.
_BANDWIDTH_SHARE: Final = 0.65
_COMPUTE_SHARE: Final = 0.8
# Products of bf16 where fp32 has one, by the CPU's flag. AMX has 16, of which those of a step attain a quarter.
_BF16_OVER_FP32: Final = {"amx_bf16": 4, "avx512_bf16": 2}
_STEP_OVERHEAD_S: Final = 0.001  # no kernels are launched
_CHOICE_OVERHEAD_S: Final = 0.0003  # to sample, and to move a sequence on


def this_machine() -> Device:
    """The CPU as a device. Its price is unknown."""
    import numpy as np  # takes a while to import

    matrix = np.ones((_MATRIX_BYTES // 4 // 4096, 4096), np.float32)
    vector, square = np.ones(4096, np.float32), np.ones((_SIDE, _SIDE), np.float32)
    flops = 2 * _SIDE**3 / _least_s(lambda: square @ square) * _bf16_over_fp32()
    return Device(
        name=NAME,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bytes_per_s=_MATRIX_BYTES / _least_s(lambda: matrix @ vector),
        flops=flops,
        flops_8bit=flops,
        link_bytes_per_s=0,
        bandwidth_share=_BANDWIDTH_SHARE,
        compute_share=_COMPUTE_SHARE,
        step_overhead_s=_STEP_OVERHEAD_S,
        choice_overhead_s=_CHOICE_OVERHEAD_S,
        origin="measured",
    )


def _bf16_over_fp32() -> int:
    """Products of bf16 for each of fp32; 1 on a CPU that widens bf16 to fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return 1
    return next((number for flag, number in _BF16_OVER_FP32.items() if flag in flags), 1)


def _least_s(work: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < _MIN_TRIES or sum(times) < _TRIES_S:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
