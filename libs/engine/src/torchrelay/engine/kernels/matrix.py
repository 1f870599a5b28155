"""Weights as ``linear`` takes them: plain tensors, or packed for a kernel of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class PackedMatrix(ABC):
    """An [out, in] weight in the order in which a kernel of its own reads it."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], both in the dtype of ``x``."""


Matrix = Tensor | PackedMatrix
