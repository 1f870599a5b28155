"""The rate of a tenant's changes: each makes all gateways read keys or models anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from torchrelay.common.errors import RateLimited
from torchrelay.common.recent import Recent

PER_S: Final = 5.0
BURST: Final = 100
_MAX_TENANTS: Final = 10_000


class ChangeRate:
    """A bucket of ``BURST`` changes per tenant, which ``PER_S`` fill again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: Recent[str, tuple[float, float]] = Recent(_MAX_TENANTS)  # changes left, and when

    def take(self, tenant_id: str) -> None:
        """Counts a change. Raises ``RateLimited`` if the tenant has none left."""
        now = self._clock()
        left, at = self._buckets.get(tenant_id, (BURST, now))
        left = min(BURST, left + (now - at) * PER_S)
        if left < 1:
            message = f"too many changes of keys, models and uploads: {PER_S:g} a second, {BURST} at once"
            raise RateLimited(message, retry_after_s=(1 - left) / PER_S)
        self._buckets[tenant_id] = left - 1, now
