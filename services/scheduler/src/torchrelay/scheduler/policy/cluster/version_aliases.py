"""Which models share a version: tenants that upload identical files share one pack, and one instance.

A tenant must not learn about the others: what tenants see uses the name in their own request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.core import MAX_VERSIONS, Model

_MAX_NAMES = 64  # of one version


def tenant_of(model: str) -> str:
    """``acme`` of ``acme/glossary``."""
    return model.partition("/")[0]


@dataclass(slots=True)
class _AliasUse:
    idle_timeout_s: float
    max_instances: int  # 0: the scheduler's default
    tbt_target_s: float
    at: float  # of the last admission or release


@dataclass(slots=True)
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

    def note(self, model: Model, idle_timeout_s: float, tbt_target_s: float, now: float) -> None:
        """A request used the model's name for its version; ``idle_timeout_s``, ``tbt_target_s``: its own or default."""
        shared = self._versions.get(model.version_id) or _Aliases(model.pack_id)
        self._versions[model.version_id] = shared
        shared.uses[model.name] = _AliasUse(idle_timeout_s, model.max_instances, tbt_target_s, now)
        shared.last_used = model.name

    def forget(self, name: str) -> None:
        """The model is called no more."""
        for version_id, shared in list(self._versions.items()):
            if shared.uses.pop(name, None) is None:
                continue
            if not shared.uses:
                del self._versions[version_id]
            elif shared.last_used == name:
                shared.last_used = next(reversed(shared.uses))

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

    def tbt_target_s(self, version_id: str, now: float) -> float | None:
        """The shortest among the models in use; None before the first request."""
        shared = self._versions.get(version_id)
        if shared is None:
            return None
        return min(use.tbt_target_s for use in _in_use(shared, now))

    def max_instances(self, version_id: str, now: float, default: int) -> int:
        """The most among the models in use: nobody's setting takes instances from another tenant. 0 for ``default``."""
        shared = self._versions.get(version_id)
        most = max(use.max_instances or default for use in _in_use(shared, now)) if shared is not None else default
        return most if most != default else 0


def _in_use(shared: _Aliases, now: float) -> list[_AliasUse]:
    """At least the one that was called last."""
    if len(shared.uses) == 1:
        return list(shared.uses.values())
    found = [use for use in shared.uses.values() if now - use.at < use.idle_timeout_s]
    return found or [shared.uses[shared.last_used]]
