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
class _Shared:
    pack_id: str
    names: dict[str, None] = field(default_factory=dict)  # the one used last at the end


class Namesakes:
    """The models that were called, by version; the longest unused are forgotten first."""

    def __init__(self) -> None:
        self._versions: dict[str, _Shared] = {}  # the one used last at the end

    def __iter__(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(version, pack, names)."""
        for version_id, shared in self._versions.items():
            yield version_id, shared.pack_id, tuple(sorted(shared.names))

    def note(self, version_id: str, pack_id: str, name: str) -> None:
        """A request names the version so."""
        shared = self._versions.pop(version_id, None) or _Shared(pack_id)
        self._versions[version_id] = shared
        shared.names.pop(name, None)
        shared.names[name] = None
        if len(shared.names) > _MAX_NAMES:
            del shared.names[next(iter(shared.names))]
        if len(self._versions) > _MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]

    def of(self, version_id: str) -> tuple[str, ...]:
        """The models of a version; empty while none was called."""
        shared = self._versions.get(version_id)
        return tuple(sorted(shared.names)) if shared else ()
