"""Tiers of distance between a pack and a host."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from torchrelay.scheduler.policy.core import StoreStatus


class Tier(enum.IntEnum):
    """Nearest first."""

    HOST = 0  # complete in the host's own arena
    FILLING = 1  # being received by the host
    PEER = 2  # on another host, whole or being received
    DISK = 3  # on the host's own disk
    REMOTE = 4


def tier_of(pack_id: str, host: StoreStatus, is_held: bool) -> Tier:
    """The nearest place from which the host can get the pack. ``is_held``: by any host, in RAM."""
    copy = host.copies.get(pack_id)
    if copy is not None and not copy.error:
        return Tier.HOST if copy.complete else Tier.FILLING
    if is_held:
        return Tier.PEER
    return Tier.DISK if host.disk_pack_ids and pack_id in host.disk_pack_ids else Tier.REMOTE


def is_held_by_any(pack_id: str, stores: Iterable[StoreStatus]) -> bool:
    """Whether a host has the pack, or receives it."""
    copies = (store.copies.get(pack_id) for store in stores)
    return any(copy is not None and not copy.error for copy in copies)
