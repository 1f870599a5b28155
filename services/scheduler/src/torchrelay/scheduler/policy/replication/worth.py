"""The worth of a pack's copy in RAM or on disk.

Unused space in an arena or on a disk is free. Once space is short, a copy is worth the extra cost of the next load
without it, from farther away: device seconds, and late requests at the operator's price. The worth falls with the time
until that load is expected and with the size of the copy. The copy with the least worth is evicted first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import Model

_GB = 1e9


@dataclass(frozen=True, slots=True)
class PackWorth:
    """The worth of one copy, in device seconds per second and GB."""

    in_ram: float = 0.0
    on_disk: float = 0.0
    return_s: float = math.inf  # until the next use is expected
    saved: float = 0.0  # device seconds that a load from RAM saves, compared with the next nearest tier

    def __str__(self) -> str:
        expected, per_hour = format_duration(self.return_s), f"{self.in_ram * 3600:.3g} per GB and hour"
        return f"its next use is expected in {expected}, and RAM saves {self.saved:.3g} device seconds then: {per_hour}"


UNKNOWN: Final = PackWorth()


def pack_worth(model: Model, load_costs: Mapping[Tier, float], return_s: float, is_on_disk: bool) -> PackWorth:
    """The worth of a copy. ``load_costs``: cost of a load by tier, in seconds of its slot. ``is_on_disk``: any host has
    the pack on disk. A nearer tier that was measured as slower counts as equally fast, so that no worth is negative.
    """
    from_ram, from_disk, from_remote = (
        model.num_devices * load_costs[tier] for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE)
    )
    from_disk = min(from_disk, from_remote)
    from_ram = min(from_ram, from_disk)
    gb_s = max(model.pack_bytes / _GB, 1e-9) * return_s
    saved = (from_disk if is_on_disk else from_remote) - from_ram
    return PackWorth(saved / gb_s, (from_remote - from_disk) / gb_s, return_s, saved)
