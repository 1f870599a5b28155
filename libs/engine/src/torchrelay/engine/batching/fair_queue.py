"""Start-time fair queueing between tenants, first come first served within one.

After Goyal, Vin and Cheng, "Start-Time Fair Queueing" (SIGCOMM 1996); charging tenants of a language model by tokens is
from Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

Every tenant has a *tag*: the service it got, divided by its weight. The lowest tag is next. Virtual time is the tag of
the last item served; a returning tenant starts there, so that absence neither saves up turns nor sheds a debt.
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
    tag: float
    joined: int  # breaks ties
    items: OrderedDict[T, None] = field(default_factory=OrderedDict)


class FairQueue(Generic[T]):
    """Hashable items by tenant. Operations take amortised O(log tenants); the order is deterministic."""

    def __init__(self) -> None:
        self._queues: dict[str, _TenantQueue[T]] = {}
        self._heap: list[tuple[float, int, str]] = []  # one entry per tenant, not above its tag
        self._now = 0.0  # virtual time
        self._joined = count()
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __contains__(self, tenant_and_item: tuple[str, T]) -> bool:
        tenant, item = tenant_and_item
        return tenant in self._queues and item in self._queues[tenant].items

    @property
    def num_tenants(self) -> int:
        """Tenants with items or a remembered tag."""
        return len(self._queues)

    def push(self, tenant: str, item: T, *, first: bool = False) -> None:
        """Appends to the tenant's items, or puts the item ``first``."""
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _TenantQueue(self._now, next(self._joined))
            heappush(self._heap, (queue.tag, queue.joined, tenant))
        elif not queue.items:
            queue.tag = max(queue.tag, self._now)
        queue.items[item] = None
        if first:
            queue.items.move_to_end(item, last=False)
        self._num_items += 1

    def head(self) -> T | None:
        """The item whose turn it is."""
        while self._heap:
            tag, joined, tenant = self._heap[0]
            queue = self._queues[tenant]
            if tag < queue.tag:
                heapreplace(self._heap, (queue.tag, joined, tenant))
            elif queue.items:
                return next(iter(queue.items))
            else:  # all others have caught up: it may return as new
                heappop(self._heap)
                del self._queues[tenant]
                self._now = max(self._now, tag)
        return None

    def charge(self, tenant: str, cost: float, weight: float) -> None:
        """Accounts for ``cost`` of service to the tenant of the head; a heavier tenant's tag rises less."""
        queue = self._queues[tenant]
        self._now = max(self._now, queue.tag)
        queue.tag += cost / weight

    def remove(self, tenant: str, item: T) -> None:
        """Removes an item; nothing happens if it is not queued."""
        queue = self._queues.get(tenant)
        if queue is not None and item in queue.items:
            del queue.items[item]
            self._num_items -= 1

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert sorted(name for _, _, name in self._heap) == sorted(self._queues), "a tenant has not one heap entry"
        assert all(tag <= self._queues[name].tag for tag, _, name in self._heap), "a heap entry is ahead of its tenant"
        assert self._num_items == sum(len(queue.items) for queue in self._queues.values()), "items are miscounted"
