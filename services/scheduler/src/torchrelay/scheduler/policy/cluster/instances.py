"""Instances, ordered by this scheduler or adopted from the reports of workers after a restart."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field, replace

from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.types import Instance, InstancePhase, WorkerStatus

STORE_LOST = "store_lost"  # the cause of a failed load
_RESTARTED = Reason("worker_restarted", "the worker was restarted")
_SLOT_TAKEN = Reason("slot_taken", "another instance took the slot")
_LEAVING = Reason("worker_leaves", "its worker was told to end")
_UNANSWERED = Reason("load_refused", "the worker did not answer, and did not begin to load")
_CONFIRM_S = 0.5  # within this time an accepted instance appears in a report, or its load has failed


class TransitionKind(enum.Enum):
    """Kind of an instance's transition."""

    ADOPTED = "adopted"  # found running; ordered by an earlier scheduler
    MOVED = "moved"  # entered another phase
    RELEASED = "released"  # drained, the slot is free again
    FAILED = "failed"  # the load did not succeed
    STOPPED = "stopped"  # its worker shut down, and announced it
    LOST = "lost"  # the worker's process died, or another instance has the slot


@dataclass(frozen=True)
class InstanceTransition:
    kind: TransitionKind
    instance: Instance  # its current record, or the last one if it is gone
    before: Instance | None = None
    reason: Reason = field(default_factory=Reason)  # for transitions that this scheduler did not order

    @property
    def gone(self) -> bool:
        return self.kind not in (TransitionKind.ADOPTED, TransitionKind.MOVED)

    @property
    def is_progress(self) -> bool:
        """Whether only more layers are loaded, which does not change what the cluster can serve, nor in which slots."""
        before, after = self.before, self.instance
        if self.kind is not TransitionKind.MOVED or before is None:
            return False
        return (before.phase, before.roles, before.accepted) == (after.phase, after.roles, after.accepted)


class Instances:
    """Instances by id; at most one per worker."""

    def __init__(self, on_change: Callable[[str, bool], None] = lambda version_id, is_progress: None) -> None:
        """``on_change`` is called with the version of each record that is put or removed, and whether only more of its
        layers are loaded.
        """
        self._on_change = on_change
        self._by_id: dict[str, Instance] = {}
        self._on_worker: dict[str, str] = {}
        self._of_version: dict[str, dict[str, Instance]] = {}
        self._on_host: dict[str, dict[str, None]] = {}  # instance ids
        self._last_active: dict[str, float] = {}
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

    def last_active(self, instance_id: str) -> float:
        """Time of the last placement or release of an attempt on the instance."""
        return self._last_active[instance_id]

    def put(self, instance: Instance, *, is_progress: bool = False) -> None:
        """Adds an instance, or replaces its record. ``is_progress``: only more of its layers are loaded."""
        assert self._on_worker.get(instance.worker_id, instance.instance_id) == instance.instance_id
        self._by_id[instance.instance_id] = instance
        self._on_worker[instance.worker_id] = instance.instance_id
        self._of_version.setdefault(instance.version_id, {})[instance.instance_id] = instance
        self._on_host.setdefault(instance.host_id, {})[instance.instance_id] = None
        self._last_active.setdefault(instance.instance_id, instance.created_at)
        self._set_loading(instance, instance.phase is InstancePhase.LOADING)
        if instance.phase is InstancePhase.DRAINING:
            self._draining[instance.instance_id] = None
        else:
            self._draining.pop(instance.instance_id, None)
        self._on_change(instance.version_id, is_progress)

    def remove(self, instance_id: str) -> Instance | None:
        instance = self._by_id.pop(instance_id, None)
        if instance is not None:
            del self._on_worker[instance.worker_id], self._last_active[instance_id]
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
        if instance_id in self._by_id:
            self._last_active[instance_id] = now

    def observe(self, worker: WorkerStatus, now: float) -> list[InstanceTransition]:
        """Updates the record of the worker's slot from its report."""
        changes: list[InstanceTransition] = []
        if known := self.on_worker(worker.worker_id):
            change = _transition(known, worker, now)
            if change is None:
                return []
            if not change.gone:
                if change.before == change.instance:
                    return []
                self.put(change.instance, is_progress=change.is_progress)
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
        return [InstanceTransition(kind, instance, instance, reason)]


def _transition(known: Instance, worker: WorkerStatus, now: float) -> InstanceTransition | None:
    """The transition that the report implies for the instance in the worker's slot; None if it implies none."""
    slot = worker.slot
    if known.incarnation != worker.incarnation:
        return InstanceTransition(TransitionKind.LOST, known, known, _RESTARTED)
    if slot.phase is not InstancePhase.FREE and slot.instance_id == known.instance_id:
        return InstanceTransition(TransitionKind.MOVED, _updated(known, worker, now), known)
    if not known.accepted:
        if not known.unanswered_at or now - known.unanswered_at < _CONFIRM_S:
            return None  # the Load has not returned; its outcome decides
        return InstanceTransition(TransitionKind.FAILED, known, known, _UNANSWERED)
    if slot.phase is not InstancePhase.FREE:
        return InstanceTransition(TransitionKind.LOST, known, known, _SLOT_TAKEN)
    has_new_error = slot.error != known.error_before
    if not known.confirmed and not has_new_error and now - known.accepted_at < _CONFIRM_S:
        return None  # a report from before the Load that arrived after its outcome
    if known.phase is InstancePhase.DRAINING:
        return InstanceTransition(TransitionKind.RELEASED, known, known)
    if known.phase is InstancePhase.LOADING:
        why = slot.error or "the worker aborted the load without a reason"
        cause = STORE_LOST if slot.store_was_lost else "load_failed"
        return InstanceTransition(TransitionKind.FAILED, known, known, Reason(cause, why, {"error": why}))
    reason = Reason("slot_freed", slot.error or "the worker freed its slot")
    return InstanceTransition(TransitionKind.LOST, known, known, reason)


def _updated(known: Instance, worker: WorkerStatus, now: float) -> Instance:
    slot = worker.slot
    # A report that was sent before the worker received the drain does not undo it.
    is_draining = known.phase is InstancePhase.DRAINING or worker.is_leaving
    phase = InstancePhase.DRAINING if is_draining else slot.phase
    # Nor does one that was sent before the worker took its new roles and arrives after its reply.
    has_new_roles = now - known.roles_since < _CONFIRM_S
    return replace(
        known,
        phase=phase,
        since=now if phase is not known.phase else known.since,
        reason=_LEAVING if worker.is_leaving else known.reason,
        roles=known.roles if has_new_roles else slot.roles or known.roles,
        accepted_at=known.accepted_at or now,
        confirmed=True,
        num_layers_ready=slot.num_layers_ready,
        num_layers=slot.num_layers,
        # A worker of an earlier release reports its layers alone.
        loaded_share=slot.loaded_share or slot.num_layers_ready / max(slot.num_layers, 1),
        progressed_at=known.progressed_at if slot.num_layers_ready == known.num_layers_ready else now,
    )


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
    return _updated(instance, worker, now)
