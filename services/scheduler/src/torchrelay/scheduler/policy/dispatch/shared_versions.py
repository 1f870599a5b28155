"""Versions that several tenants call at the same time, because identical uploads share their instances."""

from __future__ import annotations

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.types import MAX_VERSIONS

# A worker's fixed time to begin and hand over a prompt, however short. If a full step's worth of short prompts were
# dispatched at once, a tenant's burst would put dozens of them ahead of another tenant's next request.
_BEGIN_S = 0.003
_RECENT_S = 2.0


def max_prompts_ahead(latency: LatencyModel) -> int:
    """Maximum number of prompts at an instance that several tenants use: as many as begin within a step's fixed time,
    for this step and the next.
    """
    return 2 * max(1, round(latency.prefill.base_s / _BEGIN_S))


class SharedVersions:
    """For each version: the tenant and time of the last request, and the time of another tenant's last request."""

    def __init__(self) -> None:
        self._last: Recent[str, tuple[str, float, float]] = Recent(MAX_VERSIONS)

    def note(self, version_id: str, tenant: str, now: float) -> None:
        """Records the arrival of a request."""
        last_tenant, last_at, other_at = self._last.get(version_id, (tenant, now, float("-inf")))
        self._last[version_id] = (tenant, now, other_at if tenant == last_tenant else last_at)

    def is_shared(self, version_id: str, now: float) -> bool:
        """Whether two tenants have called the version within two seconds."""
        _, _, other_at = self._last.get(version_id, ("", 0.0, float("-inf")))
        return now - other_at <= _RECENT_S
