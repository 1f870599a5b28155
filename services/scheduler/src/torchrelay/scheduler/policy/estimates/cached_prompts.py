"""Share of a model's prompts that must be computed: the instances they are placed on often have prefixes cached."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.types import MAX_VERSIONS

_WINDOW = 64  # length of the moving averages, in prompts


@dataclass(slots=True)
class _Means:
    """Recent mean numbers of a prompt's tokens."""

    number: int = 0
    num_tokens: float = 0.0
    num_cached: float = 0.0


class CachedPrompts:
    """Means over recently dispatched prompts, by version, while the version has instances."""

    def __init__(self) -> None:
        self._means: Recent[str, _Means] = Recent(MAX_VERSIONS)

    def observe(self, version_id: str, num_tokens: int, num_cached: int) -> None:
        """Learns from a prompt of which the instance that it was dispatched to has ``num_cached`` tokens."""
        self._means[version_id] = means = self._means.get(version_id) or _Means()
        means.number += 1
        weight = 1 / min(means.number, _WINDOW)
        means.num_tokens += (num_tokens - means.num_tokens) * weight
        means.num_cached += (num_cached - means.num_cached) * weight

    def uncached_share(self, version_id: str) -> float:
        """Share of prompt tokens that are not cached where prompts are dispatched; 1 before the first prompt."""
        means = self._means.get(version_id)
        return 1.0 - means.num_cached / means.num_tokens if means is not None and means.num_tokens else 1.0

    def forget(self, version_id: str) -> None:
        """Forgets a version whose last instance is gone, with its caches."""
        self._means.pop(version_id, None)
