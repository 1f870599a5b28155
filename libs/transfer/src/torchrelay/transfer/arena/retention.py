"""Retention: a lease, renewed by the scheduler, that protects packs from eviction.

Retained packs are evicted last, in the order of their ranks, and only for a relay that may evict them. When the lease
expires nothing is retained, so a scheduler that died does not keep the arena full forever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence


class RetentionLease:
    """The retained packs and their ranks. Thread-safe."""

    def __init__(self) -> None:
        self._lease: tuple[float, Mapping[str, int]] = (0.0, {})  # expiry (time.monotonic), ranks

    def renew(self, pack_ids: Sequence[str], lease_s: float) -> bool:
        """Replaces the retained packs; the pack to evict first comes first. Returns whether the set of packs changed,
        whatever their order.
        """
        before = self.ranks.keys()
        ranks = {pack_id: rank for rank, pack_id in enumerate(dict.fromkeys(pack_ids))}
        self._lease = (time.monotonic() + lease_s, ranks)
        return self.ranks.keys() != before

    @property
    def ranks(self) -> Mapping[str, int]:
        """The retained packs, in the arena or not, with their ranks in the eviction order."""
        until, ranks = self._lease
        return ranks if time.monotonic() < until else {}
