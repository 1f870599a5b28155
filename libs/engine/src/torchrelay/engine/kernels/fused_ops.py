"""Fused elementwise operations of a layer: one kernel each, where launches cost more than arithmetic.

Each has a plain counterpart in ``model``, used on devices without fused ones; tests compare the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class FusedOps(ABC):
    """The operations on one kind of device."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        """As ``decoder.rms_norm``, of [rows, size]."""

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
        """Normalises and rotates the queries and keys of [rows, heads + 2 * kv heads, head_dim]; returns the queries.

        Keys and values go to their slots in ``kv``, [2, slots, kv heads, head_dim]. ``angles`` are cosines and sines.
        """

    @abstractmethod
    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up of [rows, 2 * size], which holds the two side by side."""
