"""Models that share a version: tenants that upload identical files share a pack and its instances.

A tenant must not learn about other tenants, so texts for tenants use the name in their own request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.types import MAX_VERSIONS, Model, SlotClass

_MAX_NAMES = 64  # per version
_IN_USE_S = 600.0  # after its last request, for a model without an idle timeout of its own


def tenant_of(model: str) -> str:
    """``acme`` of ``acme/glossary``."""
    return model.partition("/")[0]


@dataclass(slots=True)
class _AliasUse:
    idle_timeout_s: float  # 0: computed
    max_instances: int  # 0: the scheduler's default
    tbt_target_s: float
    slot_class: SlotClass
    at: float  # of the last admission or release
    is_deleted: bool  # no longer in the catalog, and not shown any more


@dataclass(slots=True)
class _Aliases:
    pack_id: str
    uses: Recent[str, _AliasUse] = field(default_factory=lambda: Recent(_MAX_NAMES))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, use in self.uses.items() if not use.is_deleted))


class VersionAliases:
    """The requested models by version; the longest unused versions are evicted first."""

    def __init__(self, on_change: Callable[[str], None] = lambda version_id: None) -> None:
        """``on_change`` is called with each version whose names changed."""
        self._versions: Recent[str, _Aliases] = Recent(MAX_VERSIONS)
        self._on_change = on_change

    def __iter__(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(version, pack, names)."""
        for version_id, shared in self._versions.items():
            if names := shared.names:
                yield version_id, shared.pack_id, names

    def note(
        self, model: Model, idle_timeout_s: float, tbt_target_s: float, now: float, *, is_new_call: bool = True
    ) -> None:
        """Records a use of the model's name for its version; ``idle_timeout_s``, ``tbt_target_s``: its own or default,
        0 for a timeout that is computed.

        ``is_new_call``: the request was not known before. Only such a request shows that a deleted model exists again:
        others may have come before its deletion.
        """
        oldest = next(iter(self._versions), model.version_id)
        shared = self._versions.get(model.version_id) or _Aliases(model.pack_id)
        self._versions[model.version_id] = shared
        if oldest not in self._versions:  # too many are known
            self._on_change(oldest)
        before = shared.uses.get(model.name)
        is_deleted = before is not None and before.is_deleted and not is_new_call
        shared.uses[model.name] = _AliasUse(
            idle_timeout_s, model.max_instances, tbt_target_s, model.slot_class, now, is_deleted
        )
        if before is None or before.is_deleted != is_deleted:
            self._on_change(model.version_id)

    def deleted(self, name: str) -> list[str]:
        """Marks the model as deleted from the catalog. Returns the versions that have no other name."""
        versions = [(version_id, shared) for version_id, shared in self._versions.items() if name in shared.uses]
        for version_id, shared in versions:
            shared.uses[name].is_deleted = True
            self._on_change(version_id)
        return [version_id for version_id, shared in versions if not shared.names]

    def is_deleted(self, version_id: str) -> bool:
        """Whether all models of the version are deleted."""
        shared = self._versions.get(version_id)
        return shared is not None and not shared.names

    def of(self, version_id: str) -> tuple[str, ...]:
        """The models of a version; empty before the first request and when all are deleted."""
        shared = self._versions.get(version_id)
        return shared.names if shared else ()

    def used(self, version_id: str, name: str, now: float) -> None:
        """Records the end of a request that used this name."""
        shared = self._versions.get(version_id)
        if shared and name in shared.uses:
            shared.uses[name].at = now

    def idle_timeout_s(self, version_id: str, now: float) -> tuple[float, bool]:
        """The longest idle timeout of the models in use, and whether that of any is computed: a model is in use for its
        own timeout after its last request, or for ``_IN_USE_S``.

        If none is in use, the timeout of the last requested model. Deleted models count only if all are deleted.
        """
        shared = self._versions.get(version_id)
        timeouts_s = [use.idle_timeout_s for use in _in_use(shared, now)] if shared is not None else [0.0]
        return max(timeouts_s), 0.0 in timeouts_s

    def tbt_target_s(self, version_id: str, now: float) -> float | None:
        """The shortest target of the models in use; None before the first request."""
        shared = self._versions.get(version_id)
        if shared is None:
            return None
        return min(use.tbt_target_s for use in _in_use(shared, now))

    def slot_class(self, version_id: str, now: float) -> SlotClass:
        """The slots that the models in use name. Where they differ, one device, and any engine unless all name the
        same: no tenant's setting takes another tenant's slots, and weights that need an engine keep it. A tenant's
        models that name none leave the choice to its others.
        """
        shared = self._versions.get(version_id)
        classes = {use.slot_class for use in _in_use(shared, now)} if shared is not None else set()
        if shared is not None and len({tenant_of(name) for name in shared.names}) <= 1:
            classes.discard(SlotClass())
        engines = {each.engine for each in classes}
        if len(classes) == 1:
            return classes.pop()
        return SlotClass(engine=engines.pop()) if len(engines) == 1 else SlotClass()

    def max_instances(self, version_id: str, now: float, default: int) -> int:
        """The greatest limit of the models in use, so that no tenant's setting reduces another tenant's instances; 0 if
        it equals ``default``.
        """
        shared = self._versions.get(version_id)
        most = max(use.max_instances or default for use in _in_use(shared, now)) if shared is not None else default
        return most if most != default else 0


def _in_use(shared: _Aliases, now: float) -> list[_AliasUse]:
    """Uses within their idle timeouts, or ``_IN_USE_S``; the last use if there is none."""
    if len(shared.uses) == 1:
        return list(shared.uses.values())
    counted = [use for use in shared.uses.values() if not use.is_deleted] or list(shared.uses.values())
    return [use for use in counted if now - use.at < (use.idle_timeout_s or _IN_USE_S)] or counted[-1:]
