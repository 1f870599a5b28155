"""The changes that LoRA adapters make to projections, each row with its own adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Array, Structure, addressof, c_float, c_long, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from torchrelay.engine.kernels.cpu.library import DTYPES, address, kernels

GROUPS: Final = ("qkv", "o", "gate_up", "down")  # in the order of low_rank.h
_STEP: Final = 32  # numbers of an input that the kernel takes at a time, at most


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The change of a projection: ``scaling * (x @ a.T) @ b``, added to its outputs from ``begin`` on."""

    a: Tensor  # [rank, in]
    b: Tensor  # [rank, out]
    scaling: float
    begin: int

    def add_to(self, out: Tensor, rows: Tensor | slice, x: Tensor) -> None:
        """Adds the change to these rows of a projection's output, of which ``x`` is the input. Sums are fp32, and
        rounded once.
        """
        low = torch.mm(x[rows].float(), self.a.float().t()) * self.scaling
        part = out[:, self.begin : self.begin + self.b.shape[1]]
        part[rows] = (part[rows].float() + torch.mm(low, self.b.float())).to(out.dtype)


class _Change(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("a", "b")),
        *((name, c_long) for name in ("begin", "num_out", "rank")),
        ("scaling", c_float),
    ]


class _Changes(Structure):
    _fields_ = [("each", c_void_p), ("count", c_long)]


@dataclass(frozen=True, eq=False)
class Adapter:
    """The changes of one adapter, by layer and group of projections."""

    adapter_id: str
    layers: tuple[Mapping[str, tuple[LowRank, ...]], ...]
    num_bytes: int

    @cached_property
    def addresses(self) -> tuple[Array[_Changes], list[Any]] | None:
        """The changes as the kernel reads them, and what they point to. None: the kernel does not compute them."""
        each = [change for layer in self.layers for changes in layer.values() for change in changes]
        if not all(_is_for_kernel(change.a) for change in each):
            return None
        table, kept = (_Changes * (len(self.layers) * len(GROUPS)))(), []
        for number, layer in enumerate(self.layers):
            for place, group in enumerate(GROUPS, number * len(GROUPS)):
                changes = layer.get(group, ())
                array = (_Change * len(changes))(
                    *(_Change(address(c.a), address(c.b), c.begin, c.b.shape[1], len(c.a), c.scaling) for c in changes)
                )
                kept.append(array)
                table[place] = _Changes(addressof(array), len(changes))
        return table, kept


def _is_for_kernel(a: Tensor) -> bool:
    return a.is_cpu and a.dtype != torch.float32 and a.shape[1] % _STEP == 0


class AdaptedRows:
    """The adapters of a batch's rows."""

    def __init__(self, parts: Sequence[tuple[Adapter, Sequence[int]]], num_rows: int, device: torch.device) -> None:
        """``parts``: each adapter with its rows, ascending."""
        self._parts = parts
        self._num_rows, self._device = num_rows, device

    @cached_property
    def _indices(self) -> Sequence[tuple[Adapter, Tensor | slice]]:
        return tuple((adapter, self._index(rows)) for adapter, rows in self._parts)

    def _index(self, rows: Sequence[int]) -> Tensor | slice:
        if rows[-1] - rows[0] + 1 == len(rows):  # a slice is quicker to read
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    @cached_property
    def _by_row(self) -> Array[c_void_p] | None:
        pointers = (c_void_p * self._num_rows)()
        if kernels() is None:
            return None
        for adapter, rows in self._parts:
            if adapter.addresses is None:
                return None
            for row in rows:
                pointers[row] = addressof(adapter.addresses[0])
        return pointers

    @property
    def address(self) -> int | None:
        """The address of each row's changes, for a kernel of the CPU. None: it does not compute them."""
        return None if self._by_row is None else addressof(self._by_row)

    def add_to(self, out: Tensor, layer: int, group: str, x: Tensor) -> None:
        """Adds the changes of a layer's projections to their output, of which ``x`` is the input."""
        library = kernels()
        if library is not None and (by_row := self.address) is not None:
            x = x.contiguous()
            size = x.shape[1], address(out), out.shape[1]
            library.adapt(DTYPES[x.dtype], by_row, layer, GROUPS.index(group), address(x), len(x), *size)
            return
        for adapter, rows in self._indices:
            for change in adapter.layers[layer].get(group, ()):
                change.add_to(out, rows, x)
