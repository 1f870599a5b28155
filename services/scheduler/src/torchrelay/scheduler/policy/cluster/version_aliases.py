"""Which models share a version: tenants that upload identical files share one pack, and one instance.

A tenant must not learn about the others: what tenants see uses the name in their own request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.core import MAX_VERSIONS

_MAX_NAMES = 64  # of one version


def tenant_of(model: str) -> str:
    """``acme`` of ``acme/glossary``."""
    return model.partition("/")[0]


@dataclass
class _AliasUse:
    idle_timeout_s: float
    max_instances: int  # 0: the scheduler's default
    at: float  # of the last admission or release


@dataclass
class _Aliases:
    pack_id: str
    uses: Recent[str, _AliasUse] = field(default_factory=lambda: Recent(_MAX_NAMES))
    last_used: str = ""


class VersionAliases:
    """The models that were requested, by version; the longest unused are evicted first."""

    def __init__(self) -> None:
        self._versions: Recent[str, _Aliases] = Recent(MAX_VERSIONS)

    def __iter__(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(version, pack, names)."""
        for version_id, shared in self._versions.items():
            yield version_id, shared.pack_id, tuple(sorted(shared.uses))

    def note(
        self, version_id: str, pack_id: str, name: str, idle_timeout_s: float, now: float, max_instances: int = 0
    ) -> None:
        """A request used this name for the version; ``idle_timeout_s``, ``max_instances``: the model's own settings."""
        shared = self._versions.get(version_id) or _Aliases(pack_id)
        self._versions[version_id] = shared
        shared.uses[name], shared.last_used = _AliasUse(idle_timeout_s, max_instances, now), name

    def of(self, version_id: str) -> tuple[str, ...]:
        """The models of a version; empty before the first request."""
        shared = self._versions.get(version_id)
        return tuple(sorted(shared.uses)) if shared else ()

    def used(self, version_id: str, name: str, now: float) -> None:
        """A request that used this name has ended."""
        shared = self._versions.get(version_id)
        if shared and name in shared.uses:
            shared.uses[name].at = now

    def idle_timeout_s(self, version_id: str, now: float) -> float | None:
        """The longest among the models in use: each counts for its own timeout after its last request.

        If none is in use, that of the last one requested; None before the first request.
        """
        shared = self._versions.get(version_id)
        if shared is None:
            return None
        return max(use.idle_timeout_s for use in _in_use(shared, now))

    def max_instances(self, version_id: str, now: float, default: int) -> int:
        """The most among the models in use: nobody's setting takes instances from another tenant. 0 for ``default``."""
        shared = self._versions.get(version_id)
        most = max(use.max_instances or default for use in _in_use(shared, now)) if shared is not None else default
        return most if most != default else 0


def _in_use(shared: _Aliases, now: float) -> list[_AliasUse]:
    """At least the one that was called last."""
    found = [use for use in shared.uses.values() if now - use.at < use.idle_timeout_s]
    return found or [shared.uses[shared.last_used]]
