"""Weights in the order that the CPU's quickest kernels read them, made in the background while the arena's serve.

Copies take as many bytes as the weights they stand in for. They are made where the CPU has arithmetic of the weights'
dtype: oneDNN's kernels want them in blocks. Elsewhere, and in fp32, weights stay where they are: no kernel read a copy
of them more quickly.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from torchrelay.engine.kernels.linear import Matrix, PackedMatrix, has_arithmetic
from torchrelay.engine.weights.pack_weights import LayerWeights, PackWeights

# The request that woke the model comes first: both want all cores.
REORDER_DELAY_S: Final = 1.0
MEMORY_HEADROOM: Final = 2.0  # times the weights must be available: the copies, and as much for whoever comes next
MEMINFO: Final = Path("/proc/meminfo")


class OneDnnMatrix(PackedMatrix):
    """In oneDNN's blocked layout, in the weight's own dtype."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, None, "none", [], "")
        return out


def reordered(weight: Matrix) -> Matrix:
    """A quicker copy of an [out, in] weight, or the weight itself where there is none."""
    if not isinstance(weight, Tensor) or not gains_from_reorder(weight.dtype) or not weight.is_cpu:
        return weight
    return OneDnnMatrix(weight)


def gains_from_reorder(dtype: torch.dtype) -> bool:
    """Whether any CPU kernel reads a copy of such weights more quickly than the weights where they lie."""
    return dtype != torch.float32 and has_arithmetic(dtype) and torch._C._has_mkldnn


def reordered_layer(layer: LayerWeights) -> LayerWeights:
    """The layer with its projections reordered. A mixture's experts stay: each sees too few rows."""
    layer = replace(layer, qkv=reordered(layer.qkv), o=reordered(layer.o))
    if layer.router is not None:
        return layer
    return replace(layer, gate_up=reordered(layer.gate_up), down=reordered(layer.down))


class Reorderer:
    """Swaps the layers of one instance, one by one, on a thread of its own; whoever computes sees old or new."""

    def __init__(self, weights: PackWeights, num_layers: int) -> None:
        self._weights, self._num_layers = weights, num_layers
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="reorder", daemon=True)

    def start(self) -> None:
        """(any thread) All weights are there. Idempotent."""
        with self._lock:
            if not self._is_started and not self._stop.is_set():
                self._thread.start()

    @property
    def _is_started(self) -> bool:
        return self._thread.ident is not None

    def join(self) -> None:
        """Until all layers are swapped, once it is started."""
        self._thread.join()

    def close(self) -> None:
        """Ends the thread after the layer it is at; it does not read the arena any more."""
        self._stop.set()
        with self._lock:
            if not self._is_started:
                return
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        if not gains_from_reorder(self._weights.dtype) or self._stop.wait(REORDER_DELAY_S):
            return
        if available_bytes() < MEMORY_HEADROOM * self._weights.num_bytes:
            return
        _lower_priority()
        for layer in range(self._num_layers):
            if self._stop.is_set():
                return
            self._weights.replace_layer(layer, reordered_layer(self._weights.layer(layer)))
        self._weights.replace_head(reordered(self._weights.head()))


def trim_heap() -> None:
    """What was freed goes back to the system: the allocator would keep it, as much as the weights, in a free slot."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # glibc's own


def available_bytes(meminfo: Path = MEMINFO) -> float:
    """Memory that the system could give without swapping; infinite where it does not tell."""
    try:
        found = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        return float(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return math.inf


def _lower_priority() -> None:
    """This thread computes on one core, and gives way to the engine's: a step waits for its slowest thread."""
    # NOTE: for this thread alone; a team of OpenMP threads of its own would make every step of the engine's slower.
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
