"""Paged KV memory: allocated once per slot, and partitioned into pages again for each model.

The partition is layer-major, ``[layers, 2, pages * page_tokens, kv_heads, head_dim]``: a layer's keys and values are
two plain tensors, and a position is one row (*slot*) of them. Nothing is cleared between models: no kernel reads a slot
that has not been written.
"""

from __future__ import annotations

import torch

from torchrelay.engine.batching.pages import PageTables
from torchrelay.engine.kv.host_ring import HostRing
from torchrelay.engine.kv.layout import KvShape
from torchrelay.engine.read_rate import measure_read_rate
from torchrelay.engine.weights.device_link import link_to

_FAULT_IN_STEP_BYTES = 64 << 20
_READ_BYTES = 256 << 20  # more than the caches


class KvPool:
    """The memory of one slot."""

    def __init__(self, num_bytes: int, device: str = "cpu") -> None:
        self.num_bytes = num_bytes
        self.device = torch.device(device)
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def fault_in(self) -> None:
        """Touches every byte before the slot is offered, which takes about 2 s per GB on a virtual machine."""
        for begin in range(0, self.num_bytes, _FAULT_IN_STEP_BYTES):
            self._bytes[begin : begin + _FAULT_IN_STEP_BYTES].zero_()

    def read_rate(self) -> float:
        """Bytes per second at which the device reads the pool; nothing else may use it meanwhile."""
        return measure_read_rate(self._bytes[: min(self.num_bytes, _READ_BYTES) // 4 * 4])

    def partition(self, shape: KvShape, dtype: torch.dtype, page_tokens: int, has_scratch: bool = False) -> PagedKv:
        """Pages for one model; invalidates earlier partitions. Copies and touches nothing.

        ``has_scratch`` reserves the last page as ``PageTables.scratch_slot``.
        """
        page_bytes = shape.bytes_per_token * page_tokens
        num_pages = self.num_bytes // page_bytes
        used = self._bytes[: num_pages * page_bytes].view(dtype)
        num_slots = num_pages * page_tokens
        kv = used.view(shape.num_layers, 2, num_slots, shape.num_kv_heads, shape.head_dim)
        return PagedKv(kv, max(0, num_pages - has_scratch), page_tokens)


class PagedKv:
    """The partition of the pool for one model: the tensor, the tables of its pages, and the copies to and from it."""

    def __init__(self, kv: torch.Tensor, num_pages: int, page_tokens: int) -> None:
        self.kv = kv  # [layers, 2, pages * page_tokens, kv_heads, head_dim]
        self.tables = PageTables(num_pages, page_tokens)
        self.uploads, self.downloads = HostRing(link_to(kv.device, "kv_in")), HostRing(link_to(kv.device, "kv_out"))

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page in all layers: the partial last page of a shared context, for each further choice."""
        size = self.tables.page_tokens
        self.kv[:, :, target * size : (target + 1) * size] = self.kv[:, :, source * size : (source + 1) * size]
