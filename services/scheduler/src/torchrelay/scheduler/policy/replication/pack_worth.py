"""What a copy of a pack saves where it is: the price of RAM and disk.

Room in an arena or on a disk that nobody needs costs nothing. Once it is short, a copy is worth the seconds of devices
that load the pack from farther away without it, by when it is used next, for its bytes: what is worth least goes first.
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
    """Of one copy, in device seconds saved per second and GB."""

    in_ram: float = 0.0
    on_disk: float = 0.0
    return_s: float = math.inf  # until the next use is expected
    saved_s: float = 0.0  # of a load from RAM, instead of from what is next

    def __str__(self) -> str:
        expected, saved = format_duration(self.return_s), format_duration(self.saved_s)
        per_hour = f"{self.in_ram * 3600:.2g} device seconds per GB and hour"
        return f"its next use is expected in {expected}, and RAM saves {saved} then: {per_hour}"


UNKNOWN: Final = PackWorth()


def pack_worth(model: Model, load_s: Mapping[Tier, float], return_s: float, is_on_disk: bool) -> PackWorth:
    """``load_s``: what a load takes from each tier. ``is_on_disk``: of any host."""
    per_s = model.num_devices / max(model.pack_bytes / _GB, 1e-9) / return_s
    saved_s = load_s[Tier.DISK if is_on_disk else Tier.REMOTE] - load_s[Tier.HOST]
    return PackWorth(
        in_ram=saved_s * per_s,
        on_disk=(load_s[Tier.REMOTE] - load_s[Tier.DISK]) * per_s,
        return_s=return_s,
        saved_s=saved_s,
    )
