"""The implementation of each operation for a device.

Triton, and attention backends by name, are imported at their first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

import torch

from torchrelay.engine.kernels.attention import AttentionBackend
from torchrelay.engine.kernels.capture import Capturer, CudaCapturer
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.layers import CpuLayers
from torchrelay.engine.kernels.cpu.library import kernels
from torchrelay.engine.kernels.cpu.ops import CpuOps
from torchrelay.engine.kernels.fused_ops import FusedOps
from torchrelay.modelspec.config import ModelConfig

ATTENTION_BACKENDS: Final = {
    "cpu": "torchrelay.engine.kernels.cpu.attention:CpuAttention",
    "gather": "torchrelay.engine.kernels.gather_attention:GatherAttention",
    "triton": "torchrelay.engine.kernels.triton.attention:TritonAttention",
}

# Called with a model, its dtype, the kind of each layer, and the processes that share the CPU.
WholeLayers = Callable[[ModelConfig, torch.dtype, Sequence[int], ActiveProcesses | None], CpuLayers]


@dataclass(frozen=True, slots=True)
class Backends:
    """The implementations for one device. None: plain operations take their place."""

    attention: Callable[[int], AttentionBackend]  # called with the tokens per page
    fused_ops: FusedOps | None = None
    whole_layers: WholeLayers | None = None  # several layers in one call
    capturer: Capturer | None = None  # records decode steps
    num_compiled: Callable[[], int] = lambda: 0  # kernels, at their first use
    is_compiling: Callable[[], bool] = lambda: False  # a kernel, now


def backends_for(device: torch.device, attention: str | None = None) -> Backends:
    """The quickest backends of a device; ``attention`` names another attention backend. Raises ``KeyError``."""
    backend = attention_backend(attention or default_attention(device))
    if device.type == "cuda":
        from torchrelay.engine.kernels.triton.compilations import COMPILATIONS
        from torchrelay.engine.kernels.triton.ops import TritonOps

        return Backends(
            backend,
            TritonOps(),
            capturer=CudaCapturer(),
            num_compiled=lambda: COMPILATIONS.num,
            is_compiling=lambda: COMPILATIONS.is_running,
        )
    library = kernels() if device.type == "cpu" else None
    if library is None:
        return Backends(backend)
    return Backends(backend, CpuOps(library), lambda *of: CpuLayers(library, *of))


def attention_backend(name: str) -> Callable[[int], AttentionBackend]:
    """The constructor of a backend by its registered name. Raises ``KeyError``."""
    module, _, cls = ATTENTION_BACKENDS[name].partition(":")
    backend: Callable[[int], AttentionBackend] = getattr(import_module(module), cls)
    return backend


def default_attention(device: torch.device) -> str:
    """The name of the quickest attention backend of a device."""
    if device.type == "cuda":
        return "triton"
    return "gather" if kernels() is None else "cpu"
