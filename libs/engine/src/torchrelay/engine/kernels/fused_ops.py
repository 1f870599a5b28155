"""The small steps of a layer as one kernel each, where calls cost more than arithmetic.

Each has a plain counterpart in ``model`` or ``mlp``, which computes where nothing is fused; tests compare the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrelay.engine.kernels.cpu.library import kernels
from torchrelay.modelspec.config import ModelConfig

if TYPE_CHECKING:
    from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
    from torchrelay.engine.kernels.cpu.layers import CpuLayers


class FusedOps(ABC):
    """On one kind of device."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        """``model.rms_norm`` of [rows, size]."""

    @abstractmethod
    def add_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        """The sum of two [rows, size], and its norm."""

    @abstractmethod
    def place_heads(
        self,
        heads: Tensor,
        norms: Tensor | None,
        eps: float,
        unit_offset: bool,
        angles: tuple[Tensor, Tensor],
        kv: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Norms and rotates queries and keys of [rows, heads + 2 * kv heads, head_dim]; gives the queries.

        Keys and values go to their slots in ``kv``, [2, slots, kv heads, head_dim]. ``angles`` are cosines and sines.
        """

    @abstractmethod
    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up of [rows, 2 * size], whose halves they are."""


def fused_ops_for(device: torch.device) -> FusedOps | None:
    """What computes these steps on a device, if anything does."""
    if device.type == "cuda":
        from torchrelay.engine.kernels.triton.ops import TritonOps

        return TritonOps()
    if device.type == "cpu" and (found := kernels()) is not None:
        from torchrelay.engine.kernels.cpu.ops import CpuOps

        return CpuOps(found)
    return None


def whole_layers_for(
    device: torch.device,
    config: ModelConfig,
    dtype: torch.dtype,
    kind_of_layer: Sequence[int],
    active_processes: ActiveProcesses | None,
) -> CpuLayers | None:
    """What computes several layers of a batch at once, if anything does."""
    if device.type == "cpu" and (found := kernels()) is not None:
        from torchrelay.engine.kernels.cpu.layers import CpuLayers

        return CpuLayers(found, config, dtype, kind_of_layer, active_processes)
    return None
