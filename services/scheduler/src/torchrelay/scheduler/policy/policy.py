"""All decisions of the scheduler: inputs in, effects out. No I/O and no clock, so that a simulation runs the same code.

    on each input:      change the state; mark the versions that it concerns
        for versions whose requests may be placed:                                       dispatch.place_version
            while some instance has less than one full step of prompts queued:
                of the tenant with the fewest tokens, the earliest deadline that can be met, else the first late request
                goes to the pair with the least time to the first token and delay of later tokens    placement.place
    on each tick, one of:
        place what is due by time alone, and hold an auction for the marked versions:          auction.auction
            bid = late requests that a slot saves                                               bids, lateness
            ask = late requests that it costs its model, and the load back                      asks.ask_of
            first slots: a free one, else the cheapest that asks no more than is bid            asks.take_slots
            more: while each saves more late requests than it costs                             Fluid.wanted
            drain what is unused for as long as its next load costs                             idle_slots
        every 20 ms, a turn:  mark idle versions and a few others; order copies of packs
        every 100 ms, a round: expire silent peers and stalled loads, refuse what cannot be served,
                               mark all that wait, order copies of packs

Called from a single thread, one input at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import assert_never

from torchrelay.scheduler.policy import inputs
from torchrelay.scheduler.policy.cluster.instances import TransitionKind
from torchrelay.scheduler.policy.config import ROUND_S, TURN_S, PolicyConfig
from torchrelay.scheduler.policy.dispatch import dispatch, endpoints, recalls
from torchrelay.scheduler.policy.effects import DisconnectCommand, Effects, SchedulerEvent
from torchrelay.scheduler.policy.handlers import (
    command_outcomes,
    instance_changes,
    lifecycle,
    load_notices,
    pools,
    refusals,
    relay_plans,
    reserved_slots,
    scaling,
    views,
)
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import Peer, StoreStatus, WorkerStatus

_FEW_VERSIONS = 8  # evaluated quickly enough to do so on each turn
_GONE = TransitionKind.LOST, Reason("worker_gone", "its worker's process is gone")
_STOPPED = TransitionKind.STOPPED, Reason("worker_stopped", "its worker shut down")


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
                self._react(scaling.set_minimums(state, models, now), now)
            case inputs.ModelDeleted(model):
                scaling.model_deleted(state, model, now)
            case inputs.LauncherReported(waits):
                state.launcher_waits = waits
            case inputs.GatewayChanged(gateway_id, is_connected):
                lifecycle.park(state, state.gateways.changed(gateway_id, is_connected, now))
            case inputs.WorkerReported(worker, streamed):
                self._observe_worker(worker, streamed, now)
            case inputs.StoreReported(store, streamed):
                self._observe_store(store, streamed, now)
            case inputs.Beat(Peer(store_id, True), incarnation):
                state.membership.beat_store(store_id, incarnation, now)
            case inputs.Beat(Peer(worker_id), incarnation, progress):
                self._use_pack(worker_id, now)
                if state.membership.beat_worker(worker_id, incarnation, progress, now):
                    instance = state.instances.on_worker(worker_id)
                    if instance is not None:
                        state.forget_endpoints(instance.version_id)
                    self._react(() if instance is None else (instance.version_id,), now)
            case inputs.StreamClosed(worker_id):
                state.membership.stream_closed(worker_id)
            case inputs.PeerGone(Peer(store_id, True)):
                if lost := state.membership.drop_store(store_id, now):
                    self._remove_store(lost, "the store's process is gone", now)
            case inputs.PeerGone(Peer(worker_id), is_stopped):
                if state.membership.drop_worker(worker_id, now):
                    kind, reason = _STOPPED if is_stopped else _GONE
                    self._react(instance_changes.worker_gone(state, worker_id, kind, reason, now), now)
            case inputs.CommandEnded():
                if changed := command_outcomes.apply(state, input_, now):
                    self._react((changed,), now)
            case inputs.Tick(listening_since):
                self._tick(listening_since, now)
            case _:
                assert_never(input_)
        return state.take_effects()

    def next_due(self) -> float:
        """When the next ``Tick`` is due."""
        return min(self.state.placing_due, self.state.turn_due, self.state.round_due)

    # Requests

    def _admit(self, input_: inputs.Admit, now: float) -> None:
        state, model = self.state, input_.model
        admission = lifecycle.with_settings(input_.admission, model, state.config)
        state.copies.use(model, now)
        if lifecycle.admit(state, admission, model, input_.current, input_.is_computed, now):
            dispatch.place_waiting(state, now, (model.version_id,))
            opened = state.attempts.get(admission.key)
            if opened is None:
                refusals.refuse_if_infeasible(state, admission, now)
                pools.request_waits(state, model, now)
            if opened is None or opened.placement.cold:
                if load_notices.waits_for_load(state, model.version_id):
                    state.stalls.begin(model, now)
                if not state.strategies.decides_in_turns:
                    scaling.scale(state, now, (model.version_id,))
                elif scaling.may_act_alone(state, model, now):
                    scaling.mark(state, (model.version_id,), now)
                    return
                load_notices.tell(state, (model.version_id,), now)

    def _release(self, input_: inputs.Release, now: float) -> None:
        """Closes an attempt. Workers that the gateway saw fail are named in the next admission instead, because a
        release may come long after.
        """
        state, attempt = self.state, lifecycle.release(self.state, input_.key, now)
        if attempt is None:
            return
        if input_.outcome is not None:
            lifecycle.observe_outcome(state, attempt, input_.outcome, now)
            if not input_.goes_on:
                lifecycle.observe_length(state, attempt, input_.outcome)
        if input_.is_recalled:
            recalls.recalled(state, attempt, now)
            return  # its gateway asks again at once, and it takes its turn first
        state.does_not_return(input_.key.request_id, attempt.returns_to)
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
        if instance := state.instances.on_worker(accepted.worker_id):
            endpoints.forget(state, None if was_suspect else before, accepted, instance)
        changes = state.instances.observe(accepted, now)
        self._use_pack(accepted.worker_id, now)
        for change in changes:
            instance_changes.record(self.state, change, now)
        if before is None:
            scaling.leave_other_slots(state, tuple(state.instances.versions), now)
        if accepted.is_leaving and not (before is not None and before.is_leaving):
            self._worker_leaves(accepted, now)
        own = sorted({change.instance.version_id for change in changes})
        is_new = before is None or was_suspect
        if not is_new and all(change.is_progress for change in changes):
            dispatch.place_waiting(state, now, own)
            return
        if is_new and (instance := state.instances.on_worker(accepted.worker_id)):
            own = sorted({*own, instance.version_id})
        # A slot may be free for a version without an instance.
        is_slot_free = is_new or any(change.gone for change in changes)
        self._react(own, now, is_slot_free=is_slot_free, is_complete=False)

    def _use_pack(self, worker_id: str, now: float) -> None:
        """Counts the pack of the worker's instance as used, once its size is known."""
        state, instance = self.state, self.state.instances.on_worker(worker_id)
        if instance is None or not instance.staying:
            return
        store = state.membership.store_of(instance.host_id)
        copy = store.copies.get(instance.pack_id) if store is not None else None
        num_bytes = copy.pack_bytes if copy is not None else 0
        if num_bytes or instance.pack_id in state.copies.packs:
            state.copies.use(state.model_of_pack(instance.pack_id, num_bytes), now)

    def _worker_leaves(self, worker: WorkerStatus, now: float) -> None:
        if instance := self.state.instances.on_worker(worker.worker_id):
            recalls.recall_from_leaving(self.state, instance, now)

    def _observe_store(self, store: StoreStatus, streamed: bool, now: float) -> None:
        state = self.state
        before = state.membership.stores.get(store.store_id)
        if state.membership.accept_store(store):
            state.copies.observe(store, before, now)
            if streamed:
                relay_plans.record_evictions(state, store, now)
            relay_plans.store_reported(state, store, before, now)
            if before is not None:
                return
            self._react((), now)  # slots of its host can be loaded now
        elif before is not None and state.membership.finds_duplicate(store):
            text = (
                f"{store.store_id} runs twice: the store at {before.grpc_address} counts, that at {store.grpc_address} "
            )
            text += "is refused; give one of their machines another id"
            fields = {"store_id": store.store_id, "address": store.grpc_address}
            state.effects.events.append(
                SchedulerEvent(now, "refuse_store", "", store.store_id, text, "store.refused", fields)
            )

    def _remove_store(self, store: StoreStatus, cause: str, now: float) -> None:
        relay_plans.store_lost(self.state, store, cause, now)
        self.state.copies.store_left(store, now)

    # Time

    def _tick(self, listening_since: float, now: float) -> None:
        """Does one thing that is due, so that no call takes long; if more is due, so is the next tick. Requests are
        placed first, unless a round or a turn is late.
        """
        state = self.state
        if state.placing_due <= now <= min(state.round_due, state.turn_due) + TURN_S:
            dispatch.place_due(state, now)
            self._decide_on_marked(now)
        elif state.round_due <= now:
            state.round_due = now + ROUND_S
            self._round(listening_since, now)
        elif state.turn_due <= now:
            state.turn_due = now + TURN_S
            self._turn(now)

    def _round(self, listening_since: float, now: float) -> None:
        """Handles what is due by time alone: silence, stalls, idle timeouts, grace times, retries."""
        state = self.state
        state.stalls.review(partial(load_notices.waits_for_load, state), now)
        lost = state.membership.expire(now, state.config.stale_s, listening_since)
        for lost_worker in lost.workers:
            worker, cause = lost_worker.worker, "worker_stalled" if lost_worker.is_stalled else "worker_silent"
            reason = Reason(cause, f"its worker {lost_worker.why}")
            instance_changes.worker_gone(self.state, worker.worker_id, TransitionKind.LOST, reason, now)
            state.effects.commands.append(DisconnectCommand(worker.grpc_address))
        for store in lost.stores:
            self._remove_store(store, f"its store was silent for {state.config.stale_s:g} s", now)
            state.effects.commands.append(DisconnectCommand(store.grpc_address))
        for key in state.gateways.overdue(now):
            lifecycle.release(state, key, now)
        scaling.retry_unloads(state, now)
        for instance, reason in state.load_progress.stalled(state.instances.loading, state.membership, now):
            instance_changes.give_up_load(self.state, instance, reason, now)
        due = {*state.queues.versions, *state.instances.loading_versions}
        if is_whole := now >= state.whole_round_due:
            state.whole_round_due = now + state.config.whole_scale_every_s
            refusals.refuse_infeasible(state, now)
            scaling.evaluate_minimums(state, now)
            reserved_slots.refuse_without_slot(state, now)
            due.update(state.minimums.in_force, views.expected_versions(state, now))  # these may have no instance
        dispatch.place_waiting(state, now)
        if state.strategies.decides_in_turns:
            due.update(scaling.idle_versions(state, now), state.scale_turns.due(state.instances.versions, now))
            scaling.mark(state, due, now)
            self._decide_on_marked(now)
        else:
            scaling.scale(state, now, None if is_whole else sorted(due))
            load_notices.tell(state, sorted(due), now)
        if is_whole:
            pools.evaluate_pools(state, now)
            refusals.refuse_unserved(state, now)  # by the new targets
        self._evaluate_copies(now)

    def _turn(self, now: float) -> None:
        state = self.state
        self._evaluate_copies(now)
        if not state.strategies.decides_in_turns:
            return
        scaling.mark(state, scaling.idle_versions(state, now), now)
        # Growth is decided together with all waiting versions; if these are many, the next round does so.
        waiting = state.queues.versions
        if len(waiting) <= _FEW_VERSIONS and (due := state.scale_turns.due(state.instances.versions, now)):
            scaling.mark(state, (*due, *waiting), now)

    def _decide_on_marked(self, now: float) -> None:
        load_notices.tell(self.state, scaling.scale_marked(self.state, now), now)

    def _evaluate_copies(self, now: float) -> None:
        """Evaluates a few packs and stores; not before all stores had time to report after a start."""
        state = self.state
        if not state.config.replicate or now < state.started_at + state.config.refusal_settle_s:
            return
        due, under_way = state.copies.due(now), state.transfers.ordered
        for order in state.strategies.evaluate_packs(state.copies, due, under_way, now):
            relay_plans.order_copy(state, order, now)
        state.effects.commands += state.retention.commands(now)

    # Shared

    def _react(
        self, version_ids: Collection[str], now: float, *, is_slot_free: bool = True, is_complete: bool = True
    ) -> None:
        """Places the requests of versions whose instances changed, and lets a decision follow once all inputs of the
        moment are in: reports of many workers come at once. ``is_slot_free``: also for versions without an instance.
        A strategy that takes no turns decides now; ``is_complete``: on the whole cluster.
        """
        state = self.state
        if not state.strategies.decides_in_turns:
            dispatch.place_waiting(state, now)
            scaling.scale(state, now, None if is_complete else sorted({*state.queues.versions, *version_ids}))
            return
        dispatch.place_waiting(state, now, version_ids)
        scaling.mark(state, (each for each in version_ids if scaling.has_waiting_or_minimum(state, each)), now)
        if is_slot_free:
            scaling.mark_starving(state, now)
