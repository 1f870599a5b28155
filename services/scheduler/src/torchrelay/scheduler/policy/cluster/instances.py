"""Instances, ordered by this scheduler or adopted from the reports of workers after a restart."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field

from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempts
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import InstancePhase, WorkerStatus

STORE_LOST = "store_lost"  # the cause of a failed load
_RESTARTED = Reason("worker_restarted", "the worker was restarted")
_SLOT_TAKEN = Reason("slot_taken", "another instance took the slot")
_LEAVING = Reason("worker_leaves", "its worker was told to end")
_UNANSWERED = Reason("load_refused", "the worker did not answer, and did not begin to load")
_CONFIRM_S = 0.5  # within this time an accepted instance appears in a report, or its load has failed


class TransitionKind(enum.Enum):
    """Kind of an instance's transition."""

    ADOPTED = "adopted"  # found running; ordered by an earlier scheduler
    MOVED = "moved"  # entered another phase, plays other roles, or has more layers
    RELEASED = "released"  # drained, the slot is free again
    FAILED = "failed"  # the load did not succeed
    STOPPED = "stopped"  # its worker shut down, and announced it
    LOST = "lost"  # the worker's process died, or another instance has the slot


@dataclass(frozen=True)
class InstanceTransition:
    """``since``: when it entered the phase that it had before; None if it is adopted."""

    kind: TransitionKind
    instance: Instance
    since: float | None = None
    reason: Reason = field(default_factory=Reason)  # for transitions that this scheduler did not order
    is_new_phase: bool = False
    # Only more layers are loaded, which does not change what the cluster can serve, nor in which slots.
    is_progress: bool = False

    @property
    def gone(self) -> bool:
        return self.kind not in (TransitionKind.ADOPTED, TransitionKind.MOVED)


class Instances:
    """Instances by id; at most one per worker."""

    def __init__(
        self,
        attempts: OpenAttempts,
        on_change: Callable[[str, bool], None] = lambda version_id, is_progress: None,
    ) -> None:
        """``on_change`` is called with the version of each record that is put or removed, and whether only more of its
        layers are loaded.
        """
        self._attempts, self._on_change = attempts, on_change
        self._by_id: dict[str, Instance] = {}
        self._on_worker: dict[str, str] = {}
        self._of_version: dict[str, dict[str, Instance]] = {}
        self._on_host: dict[str, dict[str, None]] = {}  # instance ids
        self._loading: dict[str, None] = {}
        self._num_loading: dict[str, int] = {}  # by version, where there are any
        self._draining: dict[str, None] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._by_id.values())

    def get(self, instance_id: str) -> Instance | None:
        return self._by_id.get(instance_id)

    def on_worker(self, worker_id: str) -> Instance | None:
        instance_id = self._on_worker.get(worker_id)
        return self._by_id[instance_id] if instance_id else None

    @property
    def workers(self) -> Container[str]:
        """Workers that have an instance."""
        return self._on_worker.keys()

    @property
    def loading(self) -> tuple[Instance, ...]:
        return tuple(self._by_id[instance_id] for instance_id in self._loading)

    @property
    def draining(self) -> tuple[Instance, ...]:
        return tuple(self._by_id[instance_id] for instance_id in self._draining)

    @property
    def loading_versions(self) -> Collection[str]:
        return self._num_loading.keys()

    @property
    def versions(self) -> Collection[str]:
        """Versions that have instances."""
        return self._of_version.keys()

    def of_version(self, version_id: str) -> tuple[Instance, ...]:
        return tuple(self._of_version.get(version_id, {}).values())

    def on_host(self, host_id: str) -> tuple[Instance, ...]:
        return tuple(self._by_id[instance_id] for instance_id in self._on_host.get(host_id, ()))

    def put(self, instance: Instance, *, is_progress: bool = False) -> None:
        """Adds an instance, or records that it has changed. ``is_progress``: only more of its layers are loaded."""
        assert self._on_worker.get(instance.worker_id, instance.instance_id) == instance.instance_id
        if instance.instance_id not in self._by_id:
            instance.work = self._attempts.work_of(instance.instance_id)
            instance.work.is_present = True
            instance.last_active = max(instance.last_active, instance.created_at)
        self._by_id[instance.instance_id] = instance
        self._on_worker[instance.worker_id] = instance.instance_id
        self._of_version.setdefault(instance.version_id, {})[instance.instance_id] = instance
        self._on_host.setdefault(instance.host_id, {})[instance.instance_id] = None
        self._set_loading(instance, instance.phase is InstancePhase.LOADING)
        if instance.phase is InstancePhase.DRAINING:
            self._draining[instance.instance_id] = None
        else:
            self._draining.pop(instance.instance_id, None)
        self._on_change(instance.version_id, is_progress)

    def remove(self, instance_id: str) -> Instance | None:
        instance = self._by_id.pop(instance_id, None)
        if instance is not None:
            del self._on_worker[instance.worker_id]
            self._attempts.instance_gone(instance_id)
            self._set_loading(instance, False)
            self._draining.pop(instance_id, None)
            for index, name in ((self._of_version, instance.version_id), (self._on_host, instance.host_id)):
                del index[name][instance_id]
                if not index[name]:
                    del index[name]
            self._on_change(instance.version_id, False)
        return instance

    def _set_loading(self, instance: Instance, is_loading: bool) -> None:
        if is_loading is (instance.instance_id in self._loading):
            return
        num_loading = self._num_loading.pop(instance.version_id, 0) + (1 if is_loading else -1)
        if num_loading:
            self._num_loading[instance.version_id] = num_loading
        if is_loading:
            self._loading[instance.instance_id] = None
        else:
            del self._loading[instance.instance_id]

    def touch(self, instance_id: str, now: float) -> None:
        """Records that an attempt was placed or released."""
        if (instance := self._by_id.get(instance_id)) is not None:
            instance.last_active = now

    def observe(self, worker: WorkerStatus, now: float) -> list[InstanceTransition]:
        """Updates the record of the worker's slot from its report."""
        changes: list[InstanceTransition] = []
        if known := self.on_worker(worker.worker_id):
            change = _transition(known, worker, now)
            if change is None:
                return []
            if not change.gone:
                self.put(known, is_progress=change.is_progress)
                return [change]
            self.remove(known.instance_id)
            changes.append(change)
        if worker.slot.phase is not InstancePhase.FREE:
            adopted = _adopted(worker, now)
            self.put(adopted)
            changes.append(InstanceTransition(TransitionKind.ADOPTED, adopted))
        return changes

    def leave(self, worker_id: str, kind: TransitionKind, reason: Reason) -> list[InstanceTransition]:
        """Removes the instance of a worker that is gone."""
        instance = self.on_worker(worker_id)
        if instance is None:
            return []
        self.remove(instance.instance_id)
        return [InstanceTransition(kind, instance, instance.since, reason)]


def _transition(known: Instance, worker: WorkerStatus, now: float) -> InstanceTransition | None:
    """Updates the instance in the worker's slot by a report; returns its transition, or None."""
    slot, since = worker.slot, known.since
    if known.incarnation != worker.incarnation:
        return InstanceTransition(TransitionKind.LOST, known, since, _RESTARTED)
    if slot.phase is not InstancePhase.FREE and slot.instance_id == known.instance_id:
        return _update(known, worker, now)
    if not known.accepted:
        if not known.unanswered_at or now - known.unanswered_at < _CONFIRM_S:
            return None  # the Load has not returned; its outcome decides
        return InstanceTransition(TransitionKind.FAILED, known, since, _UNANSWERED)
    if slot.phase is not InstancePhase.FREE:
        return InstanceTransition(TransitionKind.LOST, known, since, _SLOT_TAKEN)
    has_new_error = slot.error != known.error_before
    if not known.confirmed and not has_new_error and now - known.accepted_at < _CONFIRM_S:
        return None  # a report from before the Load that arrived after its outcome
    if known.phase is InstancePhase.DRAINING:
        return InstanceTransition(TransitionKind.RELEASED, known, since)
    if known.phase is InstancePhase.LOADING:
        why = slot.error or "the worker aborted the load without a reason"
        cause = STORE_LOST if slot.store_was_lost else "load_failed"
        return InstanceTransition(TransitionKind.FAILED, known, since, Reason(cause, why, {"error": why}))
    reason = Reason("slot_freed", slot.error or "the worker freed its slot")
    return InstanceTransition(TransitionKind.LOST, known, since, reason)


def _update(known: Instance, worker: WorkerStatus, now: float) -> InstanceTransition | None:
    """Updates the instance by its worker's report; returns what changed, or None."""
    slot, since, before, shown_before = worker.slot, known.since, _serving(known), _shown(known)
    # A report that was sent before the worker received the drain does not undo it.
    is_draining = known.phase is InstancePhase.DRAINING or worker.is_leaving
    phase = InstancePhase.DRAINING if is_draining else slot.phase
    # Nor does one that was sent before the worker took its new roles and arrives after its reply.
    has_new_roles = now - known.roles_since < _CONFIRM_S
    if is_new_phase := phase is not known.phase:
        known.phase, known.since = phase, now
    if worker.is_leaving:
        known.reason = _LEAVING
    if not has_new_roles:
        known.roles = slot.roles or known.roles
    known.accepted_at, known.confirmed = known.accepted_at or now, True
    if slot.num_layers_ready != known.num_layers_ready:
        known.num_layers_ready, known.progressed_at = slot.num_layers_ready, now
    known.num_layers = slot.num_layers
    # A worker of an earlier release reports its layers alone.
    known.loaded_share = slot.loaded_share or slot.num_layers_ready / max(slot.num_layers, 1)
    is_progress = _serving(known) == before
    if is_progress and _shown(known) == shown_before:
        return None
    return InstanceTransition(TransitionKind.MOVED, known, since, is_new_phase=is_new_phase, is_progress=is_progress)


def _serving(instance: Instance) -> tuple[object, ...]:
    return instance.phase, instance.roles, instance.accepted


def _shown(instance: Instance) -> tuple[object, ...]:
    return instance.reason, instance.confirmed, instance.num_layers_ready, instance.num_layers, instance.loaded_share


def _adopted(worker: WorkerStatus, now: float) -> Instance:
    slot = worker.slot
    instance = Instance(
        instance_id=slot.instance_id,
        model=slot.model,
        version_id=slot.version_id,
        pack_id=slot.pack_id,
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        host_id=worker.host_id,
        roles=slot.roles,
        phase=slot.phase,
        since=now,
        created_at=now,
        reason=Reason("adopted", "found running"),
    )
    _update(instance, worker, now)
    return instance
