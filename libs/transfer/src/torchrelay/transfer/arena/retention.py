"""The guard over packs that must not leave the arena just because others want their room: a lease, renewed by the
scheduler.

A pack that is named may be evicted only by a relay that is allowed to, after everything else, and in the order named.
When the lease has run out there is no guard: a scheduler that died does not keep an arena full for ever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence


class RetentionLease:
    """May be renewed and read on any thread."""

    def __init__(self) -> None:
        self._lease: tuple[float, Mapping[str, int]] = (0.0, {})  # until when, of time.monotonic; ranks

    def renew(self, pack_ids: Sequence[str], lease_s: float) -> None:
        """Takes the place of what was named before. Those that may go first, if any must, come first."""
        ranks = {pack_id: rank for rank, pack_id in enumerate(dict.fromkeys(pack_ids))}
        self._lease = (time.monotonic() + lease_s, ranks)

    @property
    def ranks(self) -> Mapping[str, int]:
        """The packs retained now, in the arena or not, with their place in the order in which they may go."""
        until, ranks = self._lease
        return ranks if time.monotonic() < until else {}
