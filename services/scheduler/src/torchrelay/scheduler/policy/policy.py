"""All decisions of the scheduler: inputs in, effects out. No I/O and no clock, so that a simulation runs the same code.

Called from a single thread, one input at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import assert_never

from torchrelay.common.quantities import format_count, format_duration
from torchrelay.scheduler.policy import inputs
from torchrelay.scheduler.policy.cluster.instances import STORE_LOST, InstanceTransition, TransitionKind
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import Instance, InstancePhase, StoreStatus, WorkerStatus
from torchrelay.scheduler.policy.effects import DisconnectCommand, Effects
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.transitions import (
    cluster_load,
    dispatch,
    lifecycle,
    pools,
    recalls,
    relay_plans,
    replication,
    reserved_slots,
    rosters,
    scaling,
    stalled_loads,
)

_FEW_VERSIONS = 8  # evaluated quickly enough to do so on each turn
_GONE = Reason("worker_gone", "its worker's process is gone")
_STOPPED = Reason("worker_stopped", "its worker shut down")


class Policy:
    """The scheduler's policy. ``new_id`` makes instance ids; ``strategies``: others than the scheduler's own make it
    decide as another system.
    """

    def __init__(
        self, config: PolicyConfig, new_id: Callable[[], str], now: float, strategies: Strategies | None = None
    ) -> None:
        self.state = State.fresh(config, new_id, now, strategies or Strategies())

    def apply(self, input_: inputs.Input, now: float) -> Effects:
        """Applies one input at ``now``; returns all effects to carry out."""
        state = self.state
        match input_:
            case inputs.Admit():
                self._admit(input_, now)
            case inputs.Withdraw(key):
                lifecycle.withdraw(state, key, now)
            case inputs.FirstToken(key):
                dispatch.first_token(state, key, now)
            case inputs.Release():
                self._release(input_, now)
            case inputs.MinimumsSet(models):
                scaling.set_minimums(state, models, now)
                self._react(now)
            case inputs.ModelDeleted(model):
                scaling.model_deleted(state, model, now)
            case inputs.GatewayConnected(gateway_id):
                lifecycle.park(state, state.gateways.connected(gateway_id, now))
            case inputs.GatewayDisconnected(gateway_id):
                lifecycle.park(state, state.gateways.disconnected(gateway_id, now))
            case inputs.WorkerReported(worker, streamed):
                self._observe_worker(worker, streamed, now)
            case inputs.WorkerBeat(worker_id, incarnation, progress):
                if state.membership.beat_worker(worker_id, incarnation, progress, now):
                    if instance := state.instances.on_worker(worker_id):
                        state.roster_cache.forget(instance.version_id)
                    self._react(now)
            case inputs.WorkerStreamClosed(worker_id):
                state.membership.stream_closed(worker_id)
            case inputs.WorkerGone(worker_id):
                self._drop_worker(worker_id, TransitionKind.LOST, _GONE, now)
            case inputs.WorkerStopped(worker_id):
                self._drop_worker(worker_id, TransitionKind.STOPPED, _STOPPED, now)
            case inputs.StoreReported(store, streamed):
                self._observe_store(store, streamed, now)
            case inputs.StoreBeat(store_id, incarnation):
                state.membership.beat_store(store_id, incarnation, now)
            case inputs.StoreGone(store_id):
                if lost := state.membership.drop_store(store_id, now):
                    self._remove_store(lost, "the store's process is gone", now)
            case inputs.LoadAccepted(instance_id):
                self._load_accepted(instance_id, now)
            case inputs.LoadUnanswered(instance_id):
                instance = state.instances.get(instance_id)
                if instance is not None and not instance.accepted:
                    state.instances.put(replace(instance, unanswered_at=now))
            case inputs.LoadRefused():
                self._load_failed(input_, now)
            case inputs.RolesSet(instance_id):
                instance = state.instances.get(instance_id)
                if instance is not None and instance.pending_roles is not None:
                    state.membership.set_roles(instance.worker_id, instance.pending_roles)
                    state.instances.put(replace(instance, roles=instance.pending_roles, pending_roles=None))
                    self._react(now)
            case inputs.RolesFailed(instance_id, cause):
                if instance := state.instances.get(instance_id):
                    retry_at = now + state.config.roles_retry_s
                    state.instances.put(replace(instance, pending_roles=None, roles_retry_at=retry_at))
                    state.happened(now, "set_roles_failed", instance, cause)
            case inputs.UnloadFailed(instance_id, cause):
                scaling.unload_failed(state, instance_id, now)
                if instance := state.instances.get(instance_id):
                    state.happened(now, "drain_failed", instance, cause)
            case inputs.CopyAccepted(pack_id, store_id):
                state.transfers.accepted((pack_id, store_id), now)
            case inputs.CopyFailed(pack_id, store_id, cause, deleted):
                relay_plans.relay_refused(state, pack_id, store_id, cause, now)
                if deleted:
                    state.replication_state.forget(pack_id)
            case inputs.RetainFailed(store_id):
                state.replication_state.retain_failed(store_id, now)
            case inputs.Due():
                dispatch.place_due(state, now)
            case inputs.Turn():
                self._turn(now)
            case inputs.Tick(listening_since):
                self._tick(listening_since, now)
            case _:
                assert_never(input_)
        return state.take_effects()

    def next_due(self) -> float:
        """When a waiting request may be placed without another input; infinite: at no known time."""
        return self.state.due.earliest

    # Requests

    def _admit(self, input_: inputs.Admit, now: float) -> None:
        state, model = self.state, input_.model
        admission = lifecycle.with_targets(input_.admission, model, state.config)
        state.replication_state.recent_packs.note(model, now)
        if lifecycle.admit(state, admission, model, input_.current, input_.is_computed, now):
            dispatch.place_waiting(state, now, (model.version_id,))
            opened = state.attempts.get(admission.key)
            if opened is None:
                lifecycle.refuse_if_infeasible(state, admission, now)
                pools.request_waits(state, model, now)
            is_short = opened is None or opened.placement.cold
            if is_short and scaling.may_act_alone(state, model, now):
                scaling.scale(state, now, (model.version_id,))

    def _release(self, input_: inputs.Release, now: float) -> None:
        """Closes an attempt. Workers that the gateway saw fail are named in the next admission instead, because a
        release may come long after.
        """
        state, attempt = self.state, lifecycle.release(self.state, input_.key, now)
        if attempt is None:
            return
        if input_.outcome is not None:
            lifecycle.observe_outcome(state, attempt, input_.outcome, now)
            lifecycle.observe_length(state, attempt, input_.outcome)
        if input_.is_recalled:
            recalls.recalled(state, attempt, now)
            return  # its gateway asks again at once, and it takes its turn first
        state.returning.remove(attempt.admission)
        if not input_.delivered:
            state.note_no_token(input_.key.request_id, attempt.instance_ids)
        dispatch.place_waiting(state, now, (attempt.admission.version_id,))

    # The cluster

    def _observe_worker(self, worker: WorkerStatus, streamed: bool, now: float) -> None:
        state = self.state
        before = state.membership.workers.get(worker.worker_id)
        was_suspect = state.membership.is_suspect(worker.worker_id)
        accepted = state.membership.accept_worker(worker, streamed)
        if accepted is None:
            return
        state.links.observe_worker(accepted, now)
        state.latency_models.observe(accepted)
        if before is None:
            rosters.note_earlier_prompts(state, accepted, now)
        if instance := state.instances.on_worker(accepted.worker_id):
            rosters.forget_roster(state, None if was_suspect else before, accepted, instance)
        changes = state.instances.observe(accepted, now)
        for change in changes:
            self._record_transition(change, now)
        if accepted.is_leaving and not (before is not None and before.is_leaving):
            self._worker_leaves(accepted, now)
        own = sorted({change.instance.version_id for change in changes})
        is_new = before is None or was_suspect
        if not is_new and all(change.is_progress for change in changes):
            dispatch.place_waiting(state, now, own)
            return
        if not state.strategies.decides_in_turns:
            dispatch.place_waiting(state, now)
            scaling.scale(state, now, sorted({*state.queues.versions, *own}))
            return
        if is_new and (instance := state.instances.on_worker(accepted.worker_id)):
            own = sorted({*own, instance.version_id})
        dispatch.place_waiting(state, now, own)
        wanting = {version_id for version_id in own if scaling.has_waiting_or_minimum(state, version_id)}
        if is_new or any(change.gone for change in changes):  # a slot may be free for a version without one
            wanting.update(scaling.starving_versions(state, now))
        if wanting:
            scaling.scale(state, now, sorted(wanting))

    def _worker_leaves(self, worker: WorkerStatus, now: float) -> None:
        if instance := self.state.instances.on_worker(worker.worker_id):
            recalls.recall_from_leaving(self.state, instance, now)

    def _drop_worker(self, worker_id: str, kind: TransitionKind, reason: Reason, now: float) -> None:
        if self.state.membership.drop_worker(worker_id, now):
            self._remove_instances(worker_id, kind, reason, now)
            self._react(now)

    def _observe_store(self, store: StoreStatus, streamed: bool, now: float) -> None:
        state = self.state
        before = state.membership.stores.get(store.store_id)
        if state.membership.accept_store(store):
            replication.store_seen(state, store, before, now)
            if streamed:
                replication.record_evictions(state, store, now)
            relay_plans.store_reported(state, store, before, now)
            if before is not None:
                return
            if state.strategies.decides_in_turns:  # slots of its host can be loaded now for versions without one
                scaling.scale(state, now, scaling.starving_versions(state, now))
            else:
                self._react(now)

    def _remove_store(self, store: StoreStatus, cause: str, now: float) -> None:
        relay_plans.store_lost(self.state, store, cause, now)
        self.state.replication_state.left(store, now + self.state.config.loss_grace_s)

    # Outcomes of commands

    def _load_accepted(self, instance_id: str, now: float) -> None:
        """Places requests on an accepted load at once: the worker computes with the layers that it has."""
        instance = self.state.instances.get(instance_id)
        if instance is not None and not instance.accepted:
            self.state.instances.put(replace(instance, accepted_at=now))
            dispatch.place_waiting(self.state, now, (instance.version_id,))

    def _load_failed(self, input_: inputs.LoadRefused, now: float) -> None:
        state, cause = self.state, input_.cause
        instance = state.instances.get(input_.instance_id)
        if instance is None:
            return
        waits_for_store = (
            input_.failed_store and instance.phase is InstancePhase.LOADING and not instance.num_layers_ready
        )
        if instance.accepted and not waits_for_store:
            return
        if input_.failed_store:
            relay_plans.relay_refused(state, instance.pack_id, input_.failed_store, cause, now)
        figures = {"error": cause} | ({"store": input_.failed_store} if input_.failed_store else {})
        self._give_up_load(instance, Reason(scaling.LOAD_REFUSED, cause, figures), now)
        self._react(now)

    # Time

    def _tick(self, listening_since: float, now: float) -> None:
        """Handles what is due by time alone: silence, stalls, idle timeouts, grace times, retries."""
        state = self.state
        lost = state.membership.expire(now, state.config.stale_s, listening_since)
        for lost_worker in lost.workers:
            worker, cause = lost_worker.worker, "worker_stalled" if lost_worker.is_stalled else "worker_silent"
            reason = Reason(cause, f"its worker {lost_worker.why}")
            self._remove_instances(worker.worker_id, TransitionKind.LOST, reason, now)
            state.effects.commands.append(DisconnectCommand(worker.grpc_address))
        for store in lost.stores:
            self._remove_store(store, f"its store was silent for {state.config.stale_s:g} s", now)
            state.effects.commands.append(DisconnectCommand(store.grpc_address))
        for key in state.gateways.overdue(now):
            lifecycle.release(state, key, now)
        state.queues.forget_debts(now)
        for version_id in state.slot_lost_at.keys() - set(state.queues.versions):
            del state.slot_lost_at[version_id]
        for version_id in state.too_large.keys() - set(state.queues.versions):
            del state.too_large[version_id]
        scaling.retry_unloads(state, now)
        state.load_failures.prune(now)
        for instance, reason in stalled_loads.detect(state, now):
            self._give_up_load(instance, reason, now)
        is_in_turns, is_whole = state.strategies.decides_in_turns, now >= state.whole_scale_due
        if is_whole:
            lifecycle.refuse_infeasible(state, now)
            state.whole_scale_due = now + state.config.whole_scale_every_s
            scaling.evaluate_minimums(state, now)
            reserved_slots.refuse_without_slot(state, now)
        if is_whole and not is_in_turns:
            self._react(now)
        else:
            dispatch.place_waiting(state, now)
            due: list[str] = []
            if is_in_turns:
                due = [*scaling.idle_versions(state, now), *state.scale_turns.due(state.instances.versions, now)]
                if is_whole:  # these may have no instance
                    due += [*state.minimums.in_force, *cluster_load.expected_versions(state, now)]
            scaling.scale(state, now, sorted({*due, *state.queues.versions, *state.instances.loading_versions}))
        if is_whole:
            pools.evaluate_pools(state, now)
            lifecycle.refuse_unserved(state, now)  # by the new targets
        replication.replicate(state, now)

    def _turn(self, now: float) -> None:
        state = self.state
        if not state.strategies.decides_in_turns:
            return
        due, waiting = scaling.idle_versions(state, now), state.queues.versions
        # Growth is decided together with all waiting versions; if these are many, the turns wait for the next tick.
        if has_few_waiting := len(waiting) <= _FEW_VERSIONS:
            due += state.scale_turns.due(state.instances.versions, now)
        if due:
            scaling.scale(state, now, sorted({*due, *(waiting if has_few_waiting else ())}))

    def _give_up_load(self, instance: Instance, reason: Reason, now: float) -> None:
        if instance.accepted:
            scaling.drain(self.state, instance, reason, now)
            self._count_failure(instance, reason, now)
        else:
            self.state.instances.remove(instance.instance_id)
            self._record_transition(InstanceTransition(TransitionKind.FAILED, instance, instance, reason), now)

    # Shared

    def _react(self, now: float) -> None:
        dispatch.place_waiting(self.state, now)
        scaling.scale(self.state, now)

    def _remove_instances(self, worker_id: str, kind: TransitionKind, reason: Reason, now: float) -> None:
        for change in self.state.instances.leave(worker_id, kind, reason):
            self._record_transition(change, now)

    def _record_transition(self, change: InstanceTransition, now: float) -> None:
        """Records that an instance appeared, changed its phase or is gone."""
        state, instance = self.state, change.instance
        if change.gone:
            if state.queues.num_waiting(instance.version_id):
                state.slot_lost_at[instance.version_id] = now
            state.prefix_index.forget(instance.instance_id)
            if not state.instances.of_version(instance.version_id):
                state.cached_prompts.forget(instance.version_id)
            state.corrections.forget(instance.instance_id)
            state.token_times.forget(instance.instance_id)
            state.load_times.end(instance.instance_id)
            state.prompt_moves.pop(instance.instance_id, None)
        fields = scaling.event_fields(instance)
        if change.before is not None:
            fields["in_state_s"] = now - change.before.since
        match change.kind:
            case TransitionKind.MOVED if change.before is not None and change.before.phase is not instance.phase:
                reason = instance.reason
                if instance.phase is InstancePhase.READY:
                    state.load_failures.succeeded(instance.version_id, instance.worker_id)
                    state.attempts.resumed(instance.instance_id, now)
                    state.load_times.end(instance.instance_id, now - instance.created_at)
                    moves = state.prompt_moves.get(instance.instance_id, {})
                    reason = _ready_reason(instance, now - change.before.since, moves)
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
                self._count_failure(instance, change.reason, now)

    def _count_failure(self, instance: Instance, reason: Reason, now: float) -> None:
        """Counts a failed load; after the last try, refuses the waiting requests unless other instances serve them."""
        state = self.state
        version_id, is_lost = instance.version_id, reason.cause == STORE_LOST
        is_of_store = is_lost or "store" in reason.figures
        if is_lost and (worker := state.membership.workers.get(instance.worker_id)) is not None:
            workers = state.membership.workers.values()
            state.load_failures.store_lost((each.worker_id for each in workers if each.host_id == worker.host_id), now)
        decided_at = instance.created_at
        if state.load_failures.add(
            version_id, instance.worker_id, reason.text, decided_at, now, is_of_store=is_of_store
        ):
            for admission in state.queues.waiting(version_id):
                if not is_of_store or now - admission.admitted_at > state.config.load_backoff_max_s:
                    lifecycle.refuse_if_given_up(state, admission, now)


def _ready_reason(instance: Instance, took_s: float, moves: Mapping[str, tuple[int, float]]) -> Reason:
    """``moves``: the prompts that other workers took over meanwhile; see ``State.prompt_moves``."""
    layers = f"all {instance.num_layers} layers" if instance.num_layers > 1 else "all"
    text = f"{layers} loaded in {format_duration(took_s)}"
    figures: dict[str, str | int | float] = {"num_layers": instance.num_layers}
    for worker_id, (number, saved_s) in moves.items():
        text += (
            f"; {worker_id} took over {format_count(number, 'prompt')} with {format_duration(saved_s)} of computation"
        )
    if moves:
        figures["num_moved"] = sum(number for number, _ in moves.values())
    return Reason("loaded", text, figures)
