"""The worth of a copy of a pack where it is: the price of RAM and disk.

Space in an arena or on a disk that nothing needs is free. Once it is short, a copy is worth what the next load
costs more without it, from farther away: seconds of devices, and late requests at the operator's price. It is worth the
less, the later that load is expected and the more bytes the copy has: what is worth least goes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torchrelay.common.quantities import format_duration
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.core import Model

_GB = 1e9


@dataclass(frozen=True, slots=True)
class PackWorth:
    """The worth of one copy, in device seconds per second and GB."""

    in_ram: float = 0.0
    on_disk: float = 0.0
    return_s: float = math.inf  # until the next use is expected
    saved: float = 0.0  # device seconds that a load from RAM costs less than one from what is next

    def __str__(self) -> str:
        expected, per_hour = format_duration(self.return_s), f"{self.in_ram * 3600:.3g} per GB and hour"
        return f"its next use is expected in {expected}, and RAM saves {self.saved:.3g} device seconds then: {per_hour}"


UNKNOWN: Final = PackWorth()


def pack_worth(model: Model, load_costs: Mapping[Tier, float], return_s: float, is_on_disk: bool) -> PackWorth:
    """``load_costs``: what a load costs from each tier, in seconds of its slot. ``is_on_disk``: of any host. A nearer
    tier that was measured as the slower one counts as no slower: a copy is never worth less than nothing.
    """
    from_ram, from_disk, from_remote = (
        model.num_devices * load_costs[tier] for tier in (Tier.HOST, Tier.DISK, Tier.REMOTE)
    )
    from_disk = min(from_disk, from_remote)
    from_ram = min(from_ram, from_disk)
    gb_s = max(model.pack_bytes / _GB, 1e-9) * return_s
    saved = (from_disk if is_on_disk else from_remote) - from_ram
    return PackWorth(saved / gb_s, (from_remote - from_disk) / gb_s, return_s, saved)
