"""Weights in the order that the CPU's quickest kernels read them, made in the background while the arena's serve.

Copies take as many bytes as the weights they stand in for. Which kernel that is was measured: where the CPU has
arithmetic of the weights' dtype, oneDNN's; where it has not, FBGEMM's, which widens fp16 to fp32 on the way into the
core. Weights in fp32 stay where they are: no kernel read a copy of them more quickly.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from torchrelay.engine.linear import Matrix, PackedMatrix, has_arithmetic, widened
from torchrelay.engine.weights import LayerWeights, Weights

# The request that woke the model comes first: both want all cores.
SETTLE_S: Final = 1.0
ROOM: Final = 2.0  # times the weights must be available: the copies, and as much for whoever comes next
MEMINFO: Final = Path("/proc/meminfo")
_MAX_FP16: Final = 65504.0
_MIN_LARGEST: Final = 2.0**-12


class OneDnnMatrix(PackedMatrix):
    """In oneDNN's blocked layout, in the weight's own dtype."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, None, "none", [], "")
        return out


class WidenedMatrix(PackedMatrix):
    """In FBGEMM's panels, in fp16; multiplied and summed in fp32. Raises ``ValueError`` for what fp16 cannot hold.

    Both dtypes fit: fp16 is itself, and bf16 has three bits of fraction less. Of bf16 only what lies below 2**-14 is
    rounded, by 2**-25 at most: that is 2**-13 of the largest weight, a sixteenth of what bf16 rounds off a sum.
    """

    def __init__(self, weight: Tensor) -> None:
        # NOTE: no temporary as large as a weight: taken between two copies that stay, each would leave a hole in the
        # heap that no later one fits, and the copies came to 1.7 times their size.
        smallest, largest = (float(end) for end in torch.aminmax(weight))
        if not _MIN_LARGEST <= max(-smallest, largest) <= _MAX_FP16:
            raise ValueError("these weights are not of fp16's size")
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(widened(weight), None)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x.float(), self._packed)
        return out.to(x.dtype)


def reordered(weight: Matrix) -> Matrix:
    """A quicker copy of an [out, in] weight, or the weight itself where there is none."""
    if not isinstance(weight, Tensor) or not weight.is_cpu or weight.dtype == torch.float32:
        return weight
    if has_arithmetic(weight.dtype):
        return OneDnnMatrix(weight) if torch._C._has_mkldnn else weight
    try:
        return WidenedMatrix(weight) if "fbgemm" in torch.backends.quantized.supported_engines else weight
    except ValueError:
        return weight


def reordered_layer(layer: LayerWeights) -> LayerWeights:
    """The layer with its projections reordered. A mixture's experts stay: each sees too few rows."""
    layer = replace(layer, qkv=reordered(layer.qkv), o=reordered(layer.o))
    if layer.router is not None:
        return layer
    return replace(layer, gate_up=reordered(layer.gate_up), down=reordered(layer.down))


class Reorderer:
    """Swaps the layers of one instance, one by one, on a thread of its own; whoever computes sees old or new."""

    def __init__(self, weights: Weights, num_layers: int) -> None:
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
        if self._stop.wait(SETTLE_S) or available_bytes() < ROOM * self._weights.num_bytes:
            return
        _step_back()
        for layer in range(self._num_layers):
            if self._stop.is_set():
                return
            self._weights.replace_layer(layer, reordered_layer(self._weights.layer(layer)))
        self._weights.replace_head(reordered(self._weights.head()))


def give_back() -> None:
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


def _step_back() -> None:
    """This thread computes on one core, and gives way to the engine's: a step waits for its slowest thread."""
    # NOTE: for this thread alone; a team of OpenMP threads of its own would make every step of the engine's slower.
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
