"""Whose turn it is: start-time fair queueing between tenants, first come first served within one.

After Goyal, Vin and Cheng, "Start-Time Fair Queueing" (SIGCOMM 1996); that tokens are the currency in which tenants of
a language model are charged is from Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

Every tenant has a *tag*: what it has been served, divided by its weight. The lowest tag is next. Virtual time is the
tag of what was served last; a tenant that comes back starts there, so nobody saves up turns by being away, and nobody
sheds a debt by leaving.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    """One tenant; ``joined`` breaks ties."""

    tag: float
    joined: int
    items: OrderedDict[T, None] = field(default_factory=OrderedDict)


class FairQueue(Generic[T]):
    """Hashable items by tenant. Every operation takes O(log tenants), spread over all; the order is deterministic."""

    def __init__(self) -> None:
        self._flows: dict[str, _TenantQueue[T]] = {}
        self._heap: list[tuple[float, int, str]] = []  # one entry per flow, at most as high as its tag
        self._now = 0.0  # virtual time
        self._joined = count()
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __contains__(self, tenant_and_item: tuple[str, T]) -> bool:
        tenant, item = tenant_and_item
        return tenant in self._flows and item in self._flows[tenant].items

    def push(self, tenant: str, item: T, *, first: bool = False) -> None:
        """Behind, or before, what else waits for the tenant."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _TenantQueue(self._now, next(self._joined))
            heappush(self._heap, (flow.tag, flow.joined, tenant))
        elif not flow.items:
            flow.tag = max(flow.tag, self._now)
        flow.items[item] = None
        if first:
            flow.items.move_to_end(item, last=False)
        self._num_items += 1

    def head(self) -> T | None:
        """Whose turn it is."""
        while self._heap:
            tag, joined, tenant = self._heap[0]
            flow = self._flows[tenant]
            if tag < flow.tag:
                heapreplace(self._heap, (flow.tag, joined, tenant))
            elif flow.items:
                return next(iter(flow.items))
            else:  # all others are as far: it may come back as if it were new
                heappop(self._heap)
                del self._flows[tenant]
                self._now = max(self._now, tag)
        return None

    def charge(self, tenant: str, cost: float, weight: float) -> None:
        """The tenant of the head is served by ``cost``; of the heavier it takes more until its tag rises as much."""
        flow = self._flows[tenant]
        self._now = max(self._now, flow.tag)
        flow.tag += cost / weight

    def remove(self, tenant: str, item: T) -> None:
        """Takes an item out, wherever it stands; nothing happens when it is not here."""
        flow = self._flows.get(tenant)
        if flow is not None and item in flow.items:
            del flow.items[item]
            self._num_items -= 1

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert sorted(name for _, _, name in self._heap) == sorted(self._flows), "a tenant has not one heap entry"
        assert all(tag <= self._flows[name].tag for tag, _, name in self._heap), "a heap entry is ahead of its tenant"
        assert self._num_items == sum(len(flow.items) for flow in self._flows.values()), "items are miscounted"
