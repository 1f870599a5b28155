"""The whole of the scheduler's deciding: inputs in, effects out; no I/O, no clock, the same in the service and a
simulation.

Every method takes one thing that happened and the time, and returns what is to be done about it. It is called from one
thread, one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import cover_both_roles
from torchrelay.scheduler.policy.cluster.instances import InstanceTransition, TransitionKind
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import (
    Admission,
    AttemptKey,
    Instance,
    InstancePhase,
    Model,
    Placement,
    StoreStatus,
    WorkerStatus,
)
from torchrelay.scheduler.policy.effects import Effects, RefusalReason
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.reasons import Reason, format_duration
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.steps import admissions, relays, replication, scaling

_GONE = Reason("worker_gone", "its worker's process is gone, without a word")
_STOPPED = Reason("worker_stopped", "its worker was told to stop")


class Policy:
    """``new_id`` makes instance ids."""

    def __init__(self, config: PolicyConfig, new_id: Callable[[], str], now: float) -> None:
        self.state = State.fresh(config, new_id, now)

    # Requests

    def admit(self, admission: Admission, model: Model, current: Placement | None, now: float) -> Effects:
        """An admission, for the first time or again. ``current``: where it runs, if it was placed before."""
        state = self.state
        state.replication_state.recent_packs.note(model, now)
        if admissions.admit(state, admission, model, current, now):
            admissions.refuse_if_infeasible(state, admission, now)
            admissions.place_waiting(state, now, (model.version_id,))
            opened = state.reservations.get(admission.key)
            if opened is None or opened.placement.cold:
                scaling.scale(state, now)
            admissions.send_waiting(state, admission, now)
        return state.take_effects()

    def withdraw(self, key: AttemptKey, now: float) -> Effects:
        admissions.withdraw(self.state, key, now)
        admissions.place_waiting(self.state, now)
        return self.state.take_effects()

    def release(self, key: AttemptKey, delivered: bool, now: float, outcome: Outcome | None = None) -> Effects:
        """The attempt is over. ``delivered``: it gave at least one token. ``outcome``: what was measured of it.

        Workers the gateway saw fail are named by the admission that follows; a release may be of long after.
        """
        attempt = admissions.release(self.state, key, now)
        if attempt is not None:
            if outcome is not None:
                admissions.observe_outcome(self.state, attempt, outcome)
            if not delivered:
                self.state.note_no_token(key.request_id, attempt.instance_ids)
            admissions.place_waiting(self.state, now, (attempt.admission.version_id,))
        return self.state.take_effects()

    def gateway_arrived(self, gateway_id: str, now: float) -> Effects:
        self.state.gateways.arrived(gateway_id, now)
        return self.state.take_effects()

    def gateway_left(self, gateway_id: str, now: float) -> Effects:
        self.state.gateways.left(gateway_id, now)
        return self.state.take_effects()

    # The cluster

    def worker_reported(self, worker: WorkerStatus, streamed: bool, now: float) -> Effects:
        """A report; ``streamed``: on the worker's own stream, where order is kept."""
        state = self.state
        is_new = worker.worker_id not in state.membership.workers
        was_suspect = state.membership.is_suspect(worker.worker_id)
        accepted = state.membership.accept_worker(worker, streamed)
        if accepted is None:
            return state.take_effects()
        self._remember_sizes()
        state.links.observe_worker(accepted, now)
        state.latency_models.observe(accepted)
        changes = state.instances.observe(accepted, now)
        for change in changes:
            self._record_transition(change, now)
        if changes or is_new or was_suspect:
            self._react(now)
        return state.take_effects()

    def worker_stream_closed(self, worker_id: str, now: float) -> Effects:
        self.state.membership.stream_closed(worker_id)
        return self.state.take_effects()

    def worker_gone(self, worker_id: str, now: float) -> Effects:
        """Nobody listens at the worker's address any more."""
        state = self.state
        if state.membership.drop_worker(worker_id, now):
            self._remove_worker(worker_id, TransitionKind.LOST, _GONE, now)
            self._react(now)
        return state.take_effects()

    def worker_left(self, worker_id: str, now: float) -> Effects:
        """The worker has said that it ends."""
        state = self.state
        if state.membership.drop_worker(worker_id, now):
            self._remove_worker(worker_id, TransitionKind.STOPPED, _STOPPED, now)
            self._react(now)
        return state.take_effects()

    def store_reported(self, store: StoreStatus, now: float) -> Effects:
        state = self.state
        before = state.membership.stores.get(store.store_id)
        if state.membership.accept_store(store):
            self._remember_sizes()
            replication.store_seen(state, store, before, now)
            relays.store_reported(state, store, before, now)
            if before is None:
                self._react(now)
        return state.take_effects()

    def store_gone(self, store_id: str, now: float) -> Effects:
        """Nobody listens at the store's address any more; its arena, and the instances in it, may well live on."""
        if store := self.state.membership.drop_store(store_id, now):
            relays.store_lost(self.state, store, "the store's process is gone", now)
            replication.store_left(self.state, store, now)
        return self.state.take_effects()

    # Outcomes of commands

    def load_accepted(self, instance_id: str, now: float) -> Effects:
        """The worker has taken the model: requests are placed there at once, it computes with the layers it has."""
        state = self.state
        instance = state.instances.get(instance_id)
        if instance is not None and not instance.accepted:
            state.instances.put(replace(instance, accepted_at=now))
            admissions.place_waiting(state, now, (instance.version_id,))
        return state.take_effects()

    def load_failed(self, instance_id: str, cause: str, now: float, relay_failed: str = "") -> Effects:
        """The order could not be carried out. ``relay_failed``: the store whose relay was the reason."""
        state = self.state
        instance = state.instances.get(instance_id)
        if instance is not None and not instance.accepted:
            state.instances.remove(instance_id)
            if relay_failed:
                relays.relay_refused(state, instance.pack_id, relay_failed, cause, now)
            self._record_transition(
                InstanceTransition(
                    TransitionKind.FAILED, instance, instance, Reason("load_refused", cause, {"error": cause})
                ),
                now,
            )
            self._react(now)
        return state.take_effects()

    def roles_set(self, instance_id: str, now: float) -> Effects:
        state = self.state
        instance = state.instances.get(instance_id)
        if instance is not None and instance.pending_roles is not None:
            state.instances.put(replace(instance, roles=instance.pending_roles, pending_roles=None))
            self._react(now)
        return state.take_effects()

    def roles_failed(self, instance_id: str, cause: str, now: float) -> Effects:
        state = self.state
        instance = state.instances.get(instance_id)
        if instance is not None:
            state.instances.put(replace(instance, pending_roles=None))
            state.happened(now, "set_roles_failed", instance, cause)
            self._count_failure(instance, cause, now, now)
        return state.take_effects()

    def unload_failed(self, instance_id: str, cause: str, now: float) -> Effects:
        scaling.unload_failed(self.state, instance_id, now)
        if instance := self.state.instances.get(instance_id):
            self.state.happened(now, "drain_failed", instance, cause)
        return self.state.take_effects()

    def copy_begun(self, pack_id: str, store_id: str, now: float) -> Effects:
        replication.copy_begun(self.state, pack_id, store_id, now)
        return self.state.take_effects()

    def copy_failed(self, pack_id: str, store_id: str, cause: str, now: float, gone: bool = False) -> Effects:
        replication.copy_failed(self.state, pack_id, store_id, cause, now, gone)
        return self.state.take_effects()

    def retain_failed(self, store_id: str, now: float) -> Effects:
        self.state.replication_state.not_told(store_id, now)
        return self.state.take_effects()

    # Time

    def tick(self, now: float, reports_complete_since: float = 0.0) -> Effects:
        """What is due by time alone: silence, idle timeouts, grace times, second tries.

        ``heard_since``: load reports could not be heard before this time; nobody is lost for silence before it.
        """
        state = self.state
        lost = state.membership.expire(now, state.config.stale_s, reports_complete_since)
        for worker in lost.workers:
            silent = Reason("worker_silent", f"its worker was silent for {state.config.stale_s:g} s")
            self._remove_worker(worker.worker_id, TransitionKind.LOST, silent, now)
        for store in lost.stores:
            relays.store_lost(state, store, f"its store was silent for {state.config.stale_s:g} s", now)
            replication.store_left(state, store, now)
        for key in state.gateways.overdue(now):
            admissions.release(state, key, now)
        scaling.retry_unloads(state, now)
        state.load_failures.prune(now)
        admissions.refuse_infeasible(state, now)
        self._react(now)
        replication.replicate(state, now)
        return state.take_effects()

    # Shared

    def _react(self, now: float) -> None:
        admissions.place_waiting(self.state, now)
        scaling.scale(self.state, now)

    def _remember_sizes(self) -> None:
        state = self.state
        state.largest_slot_bytes = max(state.largest_slot_bytes, state.membership.largest_slot_bytes)
        state.largest_kv_pool_bytes = max(state.largest_kv_pool_bytes, state.membership.largest_kv_pool_bytes)

    def _remove_worker(self, worker_id: str, kind: TransitionKind, reason: Reason, now: float) -> None:
        for change in self.state.instances.leave(worker_id, kind, reason):
            self._record_transition(change, now)

    def _record_transition(self, change: InstanceTransition, now: float) -> None:
        """An instance came, moved on, or went."""
        state, instance = self.state, change.instance
        if change.gone:
            state.prefix_index.forget(instance.instance_id)
        fields = scaling.event_fields(instance)
        if change.before is not None:
            fields["in_state_s"] = now - change.before.since
        match change.kind:
            case TransitionKind.MOVED if change.before is not None and change.before.phase is not instance.phase:
                reason = instance.reason
                if instance.phase is InstancePhase.READY:
                    state.load_failures.forget(instance.version_id)
                    reason = _ready(instance, now - change.before.since)
                phase = instance.phase.value
                state.happened(now, phase, instance, reason, f"instance.{phase}", fields)
            case TransitionKind.ADOPTED:
                state.happened(now, "adopted", instance, instance.reason, f"instance.{instance.phase.value}", fields)
            case TransitionKind.RELEASED:
                state.happened(now, "released", instance, instance.reason, "instance.released", fields)
            case TransitionKind.STOPPED | TransitionKind.LOST:
                kind = change.kind.value
                state.happened(now, kind, instance, change.reason, f"instance.{kind}", fields)
            case TransitionKind.FAILED:
                state.happened(now, "load_failed", instance, change.reason, "instance.failed", fields)
                self._count_failure(instance, change.reason.text, instance.created_at, now)

    def _count_failure(self, instance: Instance, cause: str, decided_at: float, now: float) -> None:
        """Notes the try; after the last one those who wait are told, unless other instances serve them."""
        state = self.state
        if not state.load_failures.add(instance.version_id, instance.worker_id, cause, decided_at, now):
            return
        others = [other for other in state.instances.of_version(instance.version_id) if other.placeable]
        if cover_both_roles(others):
            return
        for admission in state.queues.waiting(instance.version_id):
            retry_s = state.config.load_backoff_max_s
            message = f"{admission.model} could not be loaded: {cause}"
            admissions.refuse(state, admission, RefusalReason.LOAD_FAILED, message, now, retry_s)


def _ready(instance: Instance, took_s: float) -> Reason:
    layers = f"all {instance.num_layers} layers" if instance.num_layers > 1 else "all"
    return Reason("loaded", f"{layers} loaded in {format_duration(took_s)}", {"num_layers": instance.num_layers})
