"""Fused elementwise operations of a layer: one kernel each, where launches cost more than arithmetic.

Each has a plain counterpart in ``model`` for devices without fused operations; tests compare the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

NormKind = tuple[float, bool]  # epsilon, and whether 1 is added to the weight
Angles = tuple[Tensor, Tensor]  # cosines and sines


class FusedOps(ABC):
    """The operations on one kind of device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        """The norm of ``decoder.rms_norm`` for [rows, size]."""
        return self.add_norm(x, None, weight, eps, unit_offset)[1]

    @abstractmethod
    def add_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        """The sum of two [rows, size] (``x`` itself without ``added``), and its norm."""

    @abstractmethod
    def place_heads(
        self, heads: Tensor, norms: Tensor | None, norm_kind: NormKind, angles: Angles, kv: Tensor, slots: Tensor
    ) -> Tensor:
        """Normalises and rotates the queries and keys of [rows, heads + 2 * kv heads, head_dim]; returns the queries.

        Keys and values go to their slots in ``kv``, [2, slots, kv heads, head_dim].
        """

    @abstractmethod
    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, which are side by side in [rows, 2 * size]."""
