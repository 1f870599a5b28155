"""Load times by the tier that the weights come from, as measured recently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.estimates.latency import load_s
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import Model

_NEWEST = 0.3  # weight of a new measurement


@dataclass(slots=True)
class _Begun:
    tier: Tier
    num_devices: int
    pack_id: str
    pack_bytes: int
    links: Set[str]
    is_shared: bool = False  # a load of another pack used one of its links


def _share_link(first: _Begun, second: _Begun) -> bool:
    return first.pack_id != second.pack_id and not first.links.isdisjoint(second.links)


class LoadTimes:
    """Bytes per second by tier and number of devices; without a measurement, the rates of the configuration. A load
    that shared a link would have been faster alone, so it only shows that the rate is not lower.
    """

    def __init__(self) -> None:
        self._begun: dict[str, _Begun] = {}  # by instance
        self._rates: dict[tuple[Tier, int], float] = {}
        self.num_begun: Counter[str] = Counter()  # by name of the tier
        self._by_tier: dict[tuple[int, int], Mapping[Tier, float]] = {}  # predicted, by bytes and devices

    def begin(self, instance_id: str, model: Model, tier: Tier, links: Set[str] = frozenset()) -> None:
        """Records the begin of a load. ``links``: ends of the transfers that bring the pack; none if it is there."""
        begun = _Begun(tier, model.num_devices, model.pack_id, model.pack_bytes, links)
        for other in self._begun.values():
            if _share_link(begun, other):
                begun.is_shared = other.is_shared = True
        self._begun[instance_id] = begun
        self.num_begun[tier.name.lower()] += 1

    def end(self, instance_id: str, took_s: float | None = None) -> None:
        """Records the end of a load; ``took_s``: its duration if it succeeded."""
        begun = self._begun.pop(instance_id, None)
        if begun is None or not took_s:
            return
        key, rate = (begun.tier, begun.num_devices), begun.pack_bytes / took_s
        before = self._rates.get(key)
        if begun.is_shared and (before is None or rate < before):
            return
        before = before or rate
        self._rates[key] = before ** (1 - _NEWEST) * rate**_NEWEST
        self._by_tier.clear()

    def by_tier(self, model: Model, config: PolicyConfig) -> Mapping[Tier, float]:
        """``predict_s`` from each tier."""
        key = model.pack_bytes, model.num_devices
        by_tier = self._by_tier.get(key)
        if by_tier is None:
            by_tier = self._by_tier[key] = {tier: self.predict_s(model, tier, config) for tier in Tier}
        return by_tier

    def predict_s(self, model: Model, tier: Tier, config: PolicyConfig) -> float:
        """Predicted load time, from an empty slot to all layers ready."""
        if rate := self._rate(tier, model.num_devices):
            return model.pack_bytes / rate
        farther = [self._rate(each, model.num_devices) for each in Tier if each > tier]
        slowest = [load_s(model.pack_bytes, tier, config), *(model.pack_bytes / rate for rate in farther if rate)]
        return min(slowest)  # a nearer tier takes no longer than a farther one

    def _rate(self, tier: Tier, num_devices: int) -> float:
        """Measured rate for the nearest number of devices with a measurement; 0 without any."""
        measured = [number for of_tier, number in self._rates if of_tier is tier]
        if not measured:
            return 0.0
        nearest = min(measured, key=lambda number: (abs(number - num_devices), number))
        return self._rates[tier, nearest]
