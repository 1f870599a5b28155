"""Number of slots by tenant, counted version by version: a decision on many models needs it for a few tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple


class VersionSlots(NamedTuple):
    """The slots of a version, each of which counts for all tenants that use it."""

    tenants: Collection[str]
    number: int


class TenantSlots:
    """``slots_of``: the present slots of a version."""

    def __init__(self, slots_of: Callable[[str], VersionSlots]) -> None:
        self.numbers = Counter[str]()  # callers must not change it
        self._slots_of = slots_of
        self._counted: dict[str, VersionSlots] = {}

    def changed(self, version_id: str) -> None:
        """Counts a version again whose instances or tenants changed."""
        now, before = self._slots_of(version_id), self._counted.pop(version_id, None)
        if before is not None:
            self.numbers.subtract(dict.fromkeys(before.tenants, before.number))
        if now.number:
            self._counted[version_id] = now
            self.numbers.update(dict.fromkeys(now.tenants, now.number))
        for tenant in before.tenants if before is not None else ():
            if not self.numbers[tenant]:
                del self.numbers[tenant]

    def check_integrity(self, version_ids: Iterable[str]) -> None:
        """Asserts that the numbers are those of the versions that have instances."""
        total = Counter[str]()
        for version_id in version_ids:
            slots = self._slots_of(version_id)
            total.update(dict.fromkeys(slots.tenants, slots.number))
        assert self.numbers == total
