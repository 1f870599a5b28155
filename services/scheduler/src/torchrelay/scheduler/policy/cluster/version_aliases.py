"""Which models share a version: tenants who upload the very same files have one pack, and one instance, between them.

A tenant must not learn of the others: what is told to tenants goes by the name in their own request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

_MAX_VERSIONS = 4096
_MAX_NAMES = 64  # of one version


def tenant_of(model: str) -> str:
    """``acme`` of ``acme/glossary``."""
    return model.partition("/")[0]


@dataclass
class _AliasUse:
    idle_timeout_s: float
    at: float  # when a request last came or went


@dataclass
class _Aliases:
    pack_id: str
    uses: dict[str, _AliasUse] = field(default_factory=dict)  # by name; the one called last at the end


class VersionAliases:
    """The models that were called, by version; the longest unused are forgotten first."""

    def __init__(self) -> None:
        self._versions: dict[str, _Aliases] = {}  # the one used last at the end

    def __iter__(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(version, pack, names)."""
        for version_id, shared in self._versions.items():
            yield version_id, shared.pack_id, tuple(sorted(shared.uses))

    def note(self, version_id: str, pack_id: str, name: str, idle_timeout_s: float, now: float) -> None:
        """A request names the version so; ``idle_timeout_s`` is what the model's own setting says."""
        shared = self._versions.pop(version_id, None) or _Aliases(pack_id)
        self._versions[version_id] = shared
        shared.uses.pop(name, None)
        shared.uses[name] = _AliasUse(idle_timeout_s, now)
        if len(shared.uses) > _MAX_NAMES:
            del shared.uses[next(iter(shared.uses))]
        if len(self._versions) > _MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]

    def of(self, version_id: str) -> tuple[str, ...]:
        """The models of a version; empty while none was called."""
        shared = self._versions.get(version_id)
        return tuple(sorted(shared.uses)) if shared else ()

    def used(self, version_id: str, name: str, now: float) -> None:
        """A request that named it so has ended."""
        shared = self._versions.get(version_id)
        if shared and name in shared.uses:
            shared.uses[name].at = now

    def idle_timeout_s(self, version_id: str, now: float) -> float | None:
        """The longest of the models that use the version: of each for as long after its last request. When none does,
        that of the one called last; None while none was called.
        """
        shared = self._versions.get(version_id)
        if shared is None:
            return None
        uses = list(shared.uses.values())
        in_use = [use.idle_timeout_s for use in uses if now - use.at < use.idle_timeout_s]
        return max(in_use, default=uses[-1].idle_timeout_s)
