"""How far a pack is from a host."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from torchrelay.scheduler.policy.core import StoreStatus


class Tier(enum.IntEnum):
    """Nearest first."""

    HOST = 0  # whole in the host's own arena
    FILLING = 1  # the host is receiving it
    PEER = 2  # whole or arriving on another host
    REMOTE = 3


def tier_of(pack_id: str, host: StoreStatus, stores: Iterable[StoreStatus]) -> Tier:
    """How far the pack is from a host."""
    copy = host.copies.get(pack_id)
    if copy is not None and not copy.error:
        return Tier.HOST if copy.complete else Tier.FILLING
    for store in stores:
        other = store.copies.get(pack_id)
        if other is not None and not other.error:
            return Tier.PEER
    return Tier.REMOTE
