"""Models that share a version: tenants that upload identical files share a pack and its instances.

A tenant must not learn about other tenants, so texts for tenants use the name in their own request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.types import NO_CAPS, Caps, Model, SlotClass

_MAX_NAMES = 64  # per version
_IN_USE_S = 600.0  # after its last request, for a model without an idle timeout of its own


def tenant_of(model: str) -> str:
    """``acme`` of ``acme/glossary``."""
    return model.partition("/")[0]


def _key_of(label: str) -> str:
    return label.partition("=")[0]


@dataclass(slots=True)
class _AliasUse:
    idle_timeout_s: float  # 0: computed
    max_instances: int  # 0: the scheduler's default
    tbt_target_s: float
    slot_class: SlotClass
    caps: Caps
    threads: int  # 0: no limit
    at: float  # of the last admission or release
    is_deleted: bool  # no longer in the catalog, and not shown any more


@dataclass(slots=True)
class VersionAliases:
    """The models of a version, with their own settings; the longest uncalled ones are forgotten first."""

    names: tuple[str, ...] = ()  # sorted; empty before the first request and when all are deleted
    _uses: Recent[str, _AliasUse] = field(default_factory=lambda: Recent(_MAX_NAMES))

    def note(
        self, model: Model, idle_timeout_s: float, tbt_target_s: float, now: float, *, is_new_call: bool = True
    ) -> bool:
        """Records a use of the model's name; ``idle_timeout_s``, ``tbt_target_s``: its own or default, 0 for a timeout
        that is computed. Returns whether the names changed.

        ``is_new_call``: the request was not known before. Only such a request shows that a deleted model exists again:
        others may have come before its deletion.
        """
        before = self._uses.get(model.name)
        is_deleted = before is not None and before.is_deleted and not is_new_call
        self._uses[model.name] = _AliasUse(
            idle_timeout_s,
            model.max_instances,
            tbt_target_s,
            model.slot_class,
            model.caps,
            model.threads,
            now,
            is_deleted,
        )
        if before is not None and before.is_deleted == is_deleted:
            return False
        self._list_names()
        return True

    def delete(self, name: str) -> bool:
        """Marks the model as deleted from the catalog. Returns whether the version has the name."""
        if (use := self._uses.get(name)) is None:
            return False
        use.is_deleted = True
        self._list_names()
        return True

    def _list_names(self) -> None:
        self.names = tuple(sorted(name for name, use in self._uses.items() if not use.is_deleted))

    @property
    def is_deleted(self) -> bool:
        """Whether all models of the version are deleted."""
        return bool(self._uses) and not self.names

    def used(self, name: str, now: float) -> None:
        """Records the end of a request that used this name."""
        if (use := self._uses.get(name)) is not None:
            use.at = now

    def idle_timeout_s(self, now: float) -> tuple[float, bool]:
        """The longest idle timeout of the models in use, and whether that of any is computed: a model is in use for its
        own timeout after its last request, or for ``_IN_USE_S``.

        If none is in use, the timeout of the last requested model. Deleted models count only if all are deleted.
        """
        timeouts_s = [use.idle_timeout_s for use in self._in_use(now)] or [0.0]
        return max(timeouts_s), 0.0 in timeouts_s

    def tbt_target_s(self, now: float) -> float | None:
        """The shortest target of the models in use; None before the first request."""
        return min((use.tbt_target_s for use in self._in_use(now)), default=None)

    def slot_class(self, now: float) -> SlotClass:
        """The slots that the models in use name. Where they differ, one device, and any engine unless all name the
        same: no tenant's setting takes another tenant's slots, and weights that need an engine keep it. A tenant's
        models that name none leave the choice to its others. The labels, which are the operator's, are those of all,
        without those that exclude each other: of a key with several values.
        """
        in_use = self._in_use(now)
        labels = frozenset[str]().union(*(use.slot_class.labels for use in in_use))
        num_values = Counter(_key_of(label) for label in labels)
        labels = frozenset(label for label in labels if num_values[_key_of(label)] == 1)
        classes = {use.slot_class._replace(labels=labels) for use in in_use}
        if len({tenant_of(name) for name in self.names}) <= 1:
            classes.discard(SlotClass(labels=labels))
        engines = {each.engine for each in classes}
        if len(classes) == 1:
            return classes.pop()
        return SlotClass(engine=engines.pop() if len(engines) == 1 else "", labels=labels)

    def threads(self, now: float) -> int:
        """The greatest limit of threads of the models in use; 0 if any of them has none."""
        limits = [use.threads for use in self._in_use(now)]
        return max(limits, default=0) if all(limits) else 0

    @property
    def capped(self) -> dict[str, Caps]:
        """The models that have limits."""
        return {name: use.caps for name, use in self._uses.items() if use.caps != NO_CAPS}

    def caps_of(self, name: str, forgotten: Caps = NO_CAPS) -> Caps:
        """The limits of the model's requests on an instance; ``forgotten``: those of a name that is not known here."""
        use = self._uses.get(name)
        return forgotten if use is None else use.caps

    def labels_of(self, name: str) -> frozenset[str]:
        """The labels that the model itself sets."""
        use = self._uses.get(name)
        return frozenset() if use is None else use.slot_class.labels

    def max_instances(self, now: float, default: int) -> int:
        """The greatest limit of the models in use, so that no tenant's setting reduces another tenant's instances; 0 if
        it equals ``default``.
        """
        most = max((use.max_instances or default for use in self._in_use(now)), default=default)
        return most if most != default else 0

    def _in_use(self, now: float) -> list[_AliasUse]:
        """Uses within their idle timeouts, or ``_IN_USE_S``; the last use if there is none."""
        uses = list(self._uses.values())
        if len(uses) <= 1:
            return uses
        counted = [use for use in uses if not use.is_deleted] or uses
        return [use for use in counted if now - use.at < (use.idle_timeout_s or _IN_USE_S)] or counted[-1:]
