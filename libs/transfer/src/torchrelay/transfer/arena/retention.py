"""Retention: a lease, renewed by the scheduler, on packs that others must not simply evict.

A retained pack is evicted only for a relay that is allowed to, after everything else, and in the order named. When the
lease expires nothing is retained: a scheduler that died does not keep the arena full forever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence


class RetentionLease:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lease: tuple[float, Mapping[str, int]] = (0.0, {})  # expiry (time.monotonic), ranks

    def renew(self, pack_ids: Sequence[str], lease_s: float) -> bool:
        """Replaces what was retained before. Packs to evict first, if any must be, come first. True if others are
        retained now, in whatever order.
        """
        before = self.ranks.keys()
        ranks = {pack_id: rank for rank, pack_id in enumerate(dict.fromkeys(pack_ids))}
        self._lease = (time.monotonic() + lease_s, ranks)
        return self.ranks.keys() != before

    @property
    def ranks(self) -> Mapping[str, int]:
        """The packs retained now, in the arena or not, with their rank in the order of eviction."""
        until, ranks = self._lease
        return ranks if time.monotonic() < until else {}
