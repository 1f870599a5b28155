"""Start-time fair queueing between tenants (Goyal, Vin and Cheng, SIGCOMM 1996). Pure.

Every tenant has a *tag*: the service that it got. The tenant with the lowest tag is next. Virtual time is the tag of
the tenant served last. A tenant that returns starts at virtual time, or at its own tag if that is higher: absence
neither accumulates turns nor clears a debt. Charging tenants of a language model by tokens is from Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_MIN_SWEPT: Final = 64


class StartTags:
    """The tags of tenants, and virtual time. A tenant without a tag is at virtual time."""

    def __init__(self) -> None:
        self._tags: dict[str, float] = {}
        self._now = 0.0
        self._max_tags = _MIN_SWEPT  # beyond this number, tags that virtual time has passed are dropped

    def __len__(self) -> int:
        return len(self._tags)

    def __getitem__(self, tenant: str) -> float:
        return self._tags.get(tenant, self._now)

    @property
    def has_debts(self) -> bool:
        """Whether any tag is ahead of virtual time."""
        return any(tag > self._now for tag in self._tags.values())

    def join(self, tenant: str) -> None:
        """Notes that the tenant has work again."""
        self._tags[tenant] = max(self[tenant], self._now)
        if len(self._tags) > self._max_tags:
            self._tags = {name: tag for name, tag in self._tags.items() if tag > self._now}
            self._max_tags = max(2 * len(self._tags), _MIN_SWEPT)

    def serve(self, tenant: str, cost: float = 0.0) -> None:
        """Moves virtual time to the tenant's tag and charges the tenant ``cost``."""
        self._now = max(self._now, self[tenant])
        self.charge(tenant, cost)

    def charge(self, tenant: str, cost: float) -> None:
        self._tags[tenant] = self[tenant] + cost

    def refund(self, tenant: str, cost: float) -> None:
        """Takes a charge back."""
        if tenant in self._tags:
            self._tags[tenant] -= cost

    def end_busy_period(self) -> None:
        """Moves virtual time to the highest tag, since no tenant has work: all tenants start level again."""
        self._now = max([self._now, *self._tags.values()])
        self._tags.clear()


class FairQueue(Generic[T]):
    """Hashable items by tenant, first come first served within a tenant. The order is deterministic."""

    def __init__(self) -> None:
        self.tags = StartTags()
        self._items: dict[str, OrderedDict[T, None]] = {}  # of tenants that have any
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __contains__(self, tenant_and_item: tuple[str, T]) -> bool:
        tenant, item = tenant_and_item
        return item in self._items.get(tenant, ())

    def num_of(self, tenant: str) -> int:
        return len(self._items.get(tenant, ()))

    def push(self, tenant: str, item: T, *, first: bool = False) -> None:
        """Appends the item to the tenant's items, or puts it ``first``."""
        if tenant not in self._items:
            self._items[tenant] = OrderedDict()
            self.tags.join(tenant)
        self._items[tenant][item] = None
        if first:
            self._items[tenant].move_to_end(item, last=False)
        self._num_items += 1

    def remove(self, tenant: str, item: T) -> bool:
        """Removes an item; returns False if it is not queued."""
        if (tenant, item) not in self:
            return False
        del self._items[tenant][item]
        self._num_items -= 1
        if not self._items[tenant]:
            del self._items[tenant]
        return True

    def heads(self) -> list[tuple[str, T]]:
        """Each tenant with its first item."""
        return [(tenant, next(iter(items))) for tenant, items in self._items.items()]

    def head(self) -> T | None:
        """The next item. Call it only between services: on an empty queue it ends the busy period."""
        if not self._items:
            self.tags.end_busy_period()
            return None
        tenant = min(self._items, key=self.tags.__getitem__)
        return next(iter(self._items[tenant]))

    def charge(self, tenant: str, cost: float) -> None:
        """Charges the tenant of the head for its service."""
        self.tags.serve(tenant, cost)

    def check_integrity(self) -> None:
        """Raises ``AssertionError``."""
        assert all(self._items.values()), "a tenant without items is kept"
        assert self._num_items == sum(map(len, self._items.values())), "items are miscounted"
