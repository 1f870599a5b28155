"""Reordered copies of the weights for the CPU's quickest kernels, made in the background while the originals are used.

Copies take as many bytes as the weights. They pay if the CPU has arithmetic of the weights' dtype, because oneDNN's
kernels need blocks. On other CPUs, and in fp32, no kernel read a copy more quickly than the original.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from torchrelay.engine.kernels.cpu.library import has_arithmetic
from torchrelay.engine.kernels.layer import LayerWeights, Matrix
from torchrelay.engine.weights.pack_weights import PackWeights

# The request that started the load comes first: both would use all cores.
REORDER_DELAY_S: Final = 1.0
MEMORY_HEADROOM: Final = 2.0  # times the weights must be available: for the copies and the next model
MEMINFO: Final = Path("/proc/meminfo")


class OneDnnMatrix:
    """A weight in oneDNN's blocked layout and its own dtype."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, None, "none", [], "")
        return out


def gains_from_reorder(dtype: torch.dtype) -> bool:
    """Whether a CPU kernel reads a reordered copy of weights of this dtype more quickly than the weights in place."""
    return dtype != torch.float32 and has_arithmetic(dtype) and torch._C._has_mkldnn


def reordered(weight: Matrix, gains: Callable[[torch.dtype], bool] = gains_from_reorder) -> Matrix:
    """A quicker copy of an [out, in] weight, or the weight itself if no copy is quicker."""
    if not isinstance(weight, Tensor) or not gains(weight.dtype) or not weight.is_cpu:
        return weight
    return OneDnnMatrix(weight)


def reordered_layer(layer: LayerWeights, gains: Callable[[torch.dtype], bool] = gains_from_reorder) -> LayerWeights:
    """The layer with its projections reordered, except experts, which get too few rows each."""
    layer = replace(layer, qkv=reordered(layer.qkv, gains), o=reordered(layer.o, gains))
    if layer.router is not None:
        return layer
    return replace(layer, gate_up=reordered(layer.gate_up, gains), down=reordered(layer.down, gains))


def available_bytes(meminfo: Path = MEMINFO) -> float:
    """Memory that the system could give without swapping; infinite where it is unknown."""
    try:
        row = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        return float(row.split()[1]) * 1024
    except (OSError, StopIteration):
        return math.inf


class Reorderer:
    """Replaces the layers of one instance, one by one, on its own thread; a step uses the old or the new layer."""

    def __init__(
        self,
        weights: PackWeights,
        num_layers: int,
        delay_s: float = REORDER_DELAY_S,
        gains: Callable[[torch.dtype], bool] = gains_from_reorder,
        available_bytes: Callable[[], float] = available_bytes,
    ) -> None:
        self._weights, self._num_layers = weights, num_layers
        self._delay_s, self._gains, self._available_bytes = delay_s, gains, available_bytes
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="reorder", daemon=True)

    def start(self) -> None:
        """(any thread) Starts the thread, once all weights have arrived. Idempotent."""
        with self._lock:
            if not self._is_started and not self._stop.is_set():
                self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def _is_started(self) -> bool:
        return self._thread.ident is not None

    def join(self) -> None:
        """Waits until all layers are replaced. Call it after ``start`` only."""
        self._thread.join()

    def close(self) -> None:
        """Ends the thread after its current layer; it does not read the arena afterwards."""
        self._stop.set()
        with self._lock:
            if not self._is_started:
                return
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        if not self._gains(self._weights.dtype) or self._stop.wait(self._delay_s):
            return
        if self._available_bytes() < MEMORY_HEADROOM * self._weights.num_bytes:
            return
        _lower_priority()
        for layer in range(self._num_layers):
            if self._stop.is_set():
                return
            self._weights.replace_layer(layer, reordered_layer(self._weights.layer(layer), self._gains))
        if self._weights.has_head:
            self._weights.replace_head(reordered(self._weights.head(), self._gains))


def _lower_priority() -> None:
    """Makes this thread compute on one core and yield to the engine's threads: a step waits for its slowest thread."""
    # NOTE: this is per thread. A second OpenMP team would slow down every step of the engine.
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
