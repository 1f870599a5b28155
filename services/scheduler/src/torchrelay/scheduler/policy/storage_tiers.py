"""Tiers of distance between a pack and a host."""

from __future__ import annotations

import enum

from torchrelay.scheduler.policy.types import StoreStatus


class Tier(enum.IntEnum):
    """Nearest first."""

    HOST = 0  # complete in the host's own arena
    FILLING = 1  # being received by the host
    PEER = 2  # on another host, whole or being received
    DISK = 3  # on the host's own disk
    REMOTE = 4


def tier_of(pack_id: str, host: StoreStatus, is_held: bool) -> Tier:
    """The nearest tier from which the host can get the pack. ``is_held``: any host has it in RAM or receives it."""
    copy = host.copies.get(pack_id)
    if copy is not None and not copy.error:
        return Tier.HOST if copy.complete else Tier.FILLING
    if is_held:
        return Tier.PEER
    return Tier.DISK if host.disk_pack_ids and pack_id in host.disk_pack_ids else Tier.REMOTE
