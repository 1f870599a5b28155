"""The whole of the scheduler's deciding: inputs in, effects out; no I/O, no clock, the same in the service and a
simulation.

Every method takes one thing that happened and the time, and returns what is to be done about it. It is called from one
thread, one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchrelay.scheduler import admitting, growing, relaying, replicating
from torchrelay.scheduler.core import Admission, AttemptKey, Instance, Model, Phase, Placement, Store, Worker
from torchrelay.scheduler.effects import Effects, RefusalReason
from torchrelay.scheduler.fleet import Change, Turn
from torchrelay.scheduler.prediction import Outcome
from torchrelay.scheduler.reasons import Reason, lasting
from torchrelay.scheduler.rules import Rules
from torchrelay.scheduler.situation import covers
from torchrelay.scheduler.state import State

_GONE = Reason("worker_gone", "its worker's process is gone, without a word")
_STOPPED = Reason("worker_stopped", "its worker was told to stop")


class Policy:
    """``new_id`` makes instance ids."""

    def __init__(self, rules: Rules, new_id: Callable[[], str], now: float) -> None:
        self.state = State.fresh(rules, new_id, now)

    # Requests

    def admit(self, admission: Admission, model: Model, current: Placement | None, now: float) -> Effects:
        """An admission, for the first time or again. ``current``: where it runs, if it was placed before."""
        state = self.state
        state.copybook.recency.note(model, now)
        if admitting.admit(state, admission, model, current, now):
            admitting.refuse_if_impossible(state, admission, now)
            admitting.serve(state, now, (model.version_id,))
            opened = state.books.get(admission.key)
            if opened is None or opened.placement.cold:
                growing.scale(state, now)
            admitting.say_waits(state, admission, now)
        return state.take_effects()

    def withdraw(self, key: AttemptKey, now: float) -> Effects:
        admitting.withdraw(self.state, key, now)
        admitting.serve(self.state, now)
        return self.state.take_effects()

    def release(self, key: AttemptKey, delivered: bool, now: float, outcome: Outcome | None = None) -> Effects:
        """The attempt is over. ``delivered``: it gave at least one token. ``outcome``: what was measured of it.

        Workers the gateway saw fail are named by the admission that follows; a release may be of long after.
        """
        attempt = admitting.release(self.state, key, now)
        if attempt is not None:
            if outcome is not None:
                admitting.learn(self.state, attempt, outcome)
            if not delivered:
                self.state.note_fruitless(key.request_id, attempt.instance_ids)
            admitting.serve(self.state, now, (attempt.admission.version_id,))
        return self.state.take_effects()

    def gateway_arrived(self, gateway_id: str, now: float) -> Effects:
        self.state.gateways.arrived(gateway_id, now)
        return self.state.take_effects()

    def gateway_left(self, gateway_id: str, now: float) -> Effects:
        self.state.gateways.left(gateway_id, now)
        return self.state.take_effects()

    # The cluster

    def worker_reported(self, worker: Worker, streamed: bool, now: float) -> Effects:
        """A report; ``streamed``: on the worker's own stream, where order is kept."""
        state = self.state
        is_new = worker.worker_id not in state.view.workers
        was_suspect = state.view.is_suspect(worker.worker_id)
        accepted = state.view.accept_worker(worker, streamed)
        if accepted is None:
            return state.take_effects()
        self._remember_sizes()
        state.links.observe_worker(accepted, now)
        state.latencies.observe(accepted)
        changes = state.fleet.observe(accepted, now)
        for change in changes:
            self._turned(change, now)
        if changes or is_new or was_suspect:
            self._react(now)
        return state.take_effects()

    def worker_stream_closed(self, worker_id: str, now: float) -> Effects:
        self.state.view.stream_closed(worker_id)
        return self.state.take_effects()

    def worker_gone(self, worker_id: str, now: float) -> Effects:
        """Nobody listens at the worker's address any more."""
        state = self.state
        if state.view.drop_worker(worker_id, now):
            self._leave(worker_id, Turn.LOST, _GONE, now)
            self._react(now)
        return state.take_effects()

    def worker_left(self, worker_id: str, now: float) -> Effects:
        """The worker has said that it ends."""
        state = self.state
        if state.view.drop_worker(worker_id, now):
            self._leave(worker_id, Turn.STOPPED, _STOPPED, now)
            self._react(now)
        return state.take_effects()

    def store_reported(self, store: Store, now: float) -> Effects:
        state = self.state
        before = state.view.stores.get(store.store_id)
        if state.view.accept_store(store):
            self._remember_sizes()
            replicating.store_seen(state, store, before, now)
            relaying.store_reported(state, store, before, now)
            if before is None:
                self._react(now)
        return state.take_effects()

    def store_gone(self, store_id: str, now: float) -> Effects:
        """Nobody listens at the store's address any more; its arena, and the instances in it, may well live on."""
        if store := self.state.view.drop_store(store_id, now):
            relaying.store_lost(self.state, store, "the store's process is gone", now)
            replicating.store_left(self.state, store, now)
        return self.state.take_effects()

    # Outcomes of commands

    def load_accepted(self, instance_id: str, now: float) -> Effects:
        """The worker has taken the model: requests are placed there at once, it computes with the layers it has."""
        state = self.state
        instance = state.fleet.get(instance_id)
        if instance is not None and not instance.accepted:
            state.fleet.put(replace(instance, accepted_at=now))
            admitting.serve(state, now, (instance.version_id,))
        return state.take_effects()

    def load_failed(self, instance_id: str, cause: str, now: float, relay_failed: str = "") -> Effects:
        """The order could not be carried out. ``relay_failed``: the store whose relay was the reason."""
        state = self.state
        instance = state.fleet.get(instance_id)
        if instance is not None and not instance.accepted:
            state.fleet.remove(instance_id)
            if relay_failed:
                relaying.refused(state, instance.pack_id, relay_failed, cause, now)
            self._turned(Change(Turn.FAILED, instance, instance, Reason("load_refused", cause, {"error": cause})), now)
            self._react(now)
        return state.take_effects()

    def roles_set(self, instance_id: str, now: float) -> Effects:
        state = self.state
        instance = state.fleet.get(instance_id)
        if instance is not None and instance.pending_roles is not None:
            state.fleet.put(replace(instance, roles=instance.pending_roles, pending_roles=None))
            self._react(now)
        return state.take_effects()

    def roles_failed(self, instance_id: str, cause: str, now: float) -> Effects:
        state = self.state
        instance = state.fleet.get(instance_id)
        if instance is not None:
            state.fleet.put(replace(instance, pending_roles=None))
            state.happened(now, "set_roles_failed", instance, cause)
            self._count_failure(instance, cause, now, now)
        return state.take_effects()

    def unload_failed(self, instance_id: str, cause: str, now: float) -> Effects:
        growing.unload_failed(self.state, instance_id, now)
        if instance := self.state.fleet.get(instance_id):
            self.state.happened(now, "drain_failed", instance, cause)
        return self.state.take_effects()

    def copy_begun(self, pack_id: str, store_id: str, now: float) -> Effects:
        replicating.copy_begun(self.state, pack_id, store_id, now)
        return self.state.take_effects()

    def copy_failed(self, pack_id: str, store_id: str, cause: str, now: float, gone: bool = False) -> Effects:
        replicating.copy_failed(self.state, pack_id, store_id, cause, now, gone)
        return self.state.take_effects()

    def guard_failed(self, store_id: str, now: float) -> Effects:
        self.state.copybook.not_told(store_id, now)
        return self.state.take_effects()

    # Time

    def tick(self, now: float, heard_since: float = 0.0) -> Effects:
        """What is due by time alone: silence, idle timeouts, grace times, second tries.

        ``heard_since``: load reports could not be heard before this time; nobody is lost for silence before it.
        """
        state = self.state
        lost = state.view.expire(now, state.rules.stale_s, heard_since)
        for worker in lost.workers:
            silent = Reason("worker_silent", f"its worker was silent for {state.rules.stale_s:g} s")
            self._leave(worker.worker_id, Turn.LOST, silent, now)
        for store in lost.stores:
            relaying.store_lost(state, store, f"its store was silent for {state.rules.stale_s:g} s", now)
            replicating.store_left(state, store, now)
        for key in state.gateways.overdue(now):
            admitting.release(state, key, now)
        growing.retry_unloads(state, now)
        state.failures.prune(now)
        admitting.refuse_impossible(state, now)
        self._react(now)
        replicating.replicate(state, now)
        return state.take_effects()

    # Shared

    def _react(self, now: float) -> None:
        admitting.serve(self.state, now)
        growing.scale(self.state, now)

    def _remember_sizes(self) -> None:
        state = self.state
        state.largest_slot_bytes = max(state.largest_slot_bytes, state.view.largest_slot_bytes)
        state.largest_kv_pool_bytes = max(state.largest_kv_pool_bytes, state.view.largest_kv_pool_bytes)

    def _leave(self, worker_id: str, turn: Turn, reason: Reason, now: float) -> None:
        for change in self.state.fleet.leave(worker_id, turn, reason):
            self._turned(change, now)

    def _turned(self, change: Change, now: float) -> None:
        """An instance came, moved on, or went."""
        state, instance = self.state, change.instance
        if change.gone:
            state.prefixes.forget(instance.instance_id)
        fields = growing.about(instance)
        if change.before is not None:
            fields["in_state_s"] = now - change.before.since
        match change.turn:
            case Turn.MOVED if change.before is not None and change.before.phase is not instance.phase:
                reason = instance.reason
                if instance.phase is Phase.READY:
                    state.failures.forget(instance.version_id)
                    reason = _ready(instance, now - change.before.since)
                phase = instance.phase.value
                state.happened(now, phase, instance, reason, f"instance.{phase}", fields)
            case Turn.ADOPTED:
                state.happened(now, "adopted", instance, instance.reason, f"instance.{instance.phase.value}", fields)
            case Turn.RELEASED:
                state.happened(now, "released", instance, instance.reason, "instance.released", fields)
            case Turn.STOPPED | Turn.LOST:
                turn = change.turn.value
                state.happened(now, turn, instance, change.reason, f"instance.{turn}", fields)
            case Turn.FAILED:
                state.happened(now, "load_failed", instance, change.reason, "instance.failed", fields)
                self._count_failure(instance, change.reason.text, instance.created_at, now)

    def _count_failure(self, instance: Instance, cause: str, decided_at: float, now: float) -> None:
        """Notes the try; after the last one those who wait are told, unless other instances serve them."""
        state = self.state
        if not state.failures.add(instance.version_id, instance.worker_id, cause, decided_at, now):
            return
        others = [other for other in state.fleet.of_version(instance.version_id) if other.placeable]
        if covers(others):
            return
        for admission in state.queues.waiting(instance.version_id):
            retry_s = state.rules.load_backoff_max_s
            message = f"{admission.model} could not be loaded: {cause}"
            admitting.refuse(state, admission, RefusalReason.LOAD_FAILED, message, now, retry_s)


def _ready(instance: Instance, took_s: float) -> Reason:
    layers = f"all {instance.num_layers} layers" if instance.num_layers > 1 else "all"
    return Reason("loaded", f"{layers} loaded in {lasting(took_s)}", {"num_layers": instance.num_layers})
