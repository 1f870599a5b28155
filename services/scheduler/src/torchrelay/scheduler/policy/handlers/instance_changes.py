"""Consequences of a new phase or the end of an instance, and of a given-up load."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.common.quantities import format_count, format_duration
from torchrelay.scheduler.policy.autoscaling.load_failures import LoadFailures
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.instances import STORE_LOST, InstanceTransition, TransitionKind
from torchrelay.scheduler.policy.dispatch import dispatch
from torchrelay.scheduler.policy.estimates.requests import CachedShare
from torchrelay.scheduler.policy.handlers import lifecycle, scaling
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import InstancePhase


def give_up_load(state: State, instance: Instance, reason: Reason, now: float) -> None:
    """Ends a load that failed; a load that its worker accepted is drained."""
    if instance.accepted:
        scaling.drain(state, instance, reason, now)
        _count_failure(state, instance, reason, now)
    else:
        state.instances.remove(instance.instance_id)
        record(state, InstanceTransition(TransitionKind.FAILED, instance, instance.since, reason), now)


def worker_gone(state: State, worker_id: str, kind: TransitionKind, reason: Reason, now: float) -> Sequence[str]:
    """Removes the instance of a worker that is gone; returns the version of the instance, if there is one."""
    changes = state.instances.leave(worker_id, kind, reason)
    for change in changes:
        record(state, change, now)
    return [change.instance.version_id for change in changes]


def record(state: State, change: InstanceTransition, now: float) -> None:
    """Records that an instance appeared, changed its phase or is gone."""
    instance = change.instance
    if change.gone:
        version = state.versions.of(instance.version_id)
        if state.queues.num_waiting(instance.version_id):
            version.slot_lost_at = now
        state.prefix_index.forget(instance.instance_id)
        if not state.instances.of_version(instance.version_id):
            version.usage.prompts = CachedShare()  # the caches are gone
        state.load_times.end(instance.instance_id)
    fields = scaling.event_fields(instance)
    if change.since is not None:
        fields["in_state_s"] = now - change.since
    match change.kind:
        case TransitionKind.MOVED if change.is_new_phase and change.since is not None:
            reason = instance.reason
            if instance.phase is InstancePhase.READY:
                state.versions.of(instance.version_id).failures = LoadFailures()
                state.stalls.end(instance.version_id, now)
                state.avoided_workers.succeeded(instance.worker_id)
                state.attempts.resumed(instance.instance_id, now)
                state.load_times.end(instance.instance_id, now - instance.created_at)
                reason = _ready_reason(instance, now - change.since)
            phase = instance.phase.value
            state.record_event(now, phase, instance, reason, f"instance.{phase}", fields)
        case TransitionKind.ADOPTED:
            for attempt in instance.work.prefills.values():
                dispatch.predict_earlier_prompt(state, attempt)
            state.record_event(now, "adopted", instance, instance.reason, f"instance.{instance.phase.value}", fields)
        case TransitionKind.RELEASED:
            state.record_event(now, "released", instance, instance.reason, "instance.released", fields)
        case TransitionKind.STOPPED | TransitionKind.LOST:
            kind = change.kind.value
            state.record_event(now, kind, instance, change.reason, f"instance.{kind}", fields)
        case TransitionKind.FAILED:
            state.record_event(now, "load_failed", instance, change.reason, "instance.failed", fields)
            _count_failure(state, instance, change.reason, now)


def _count_failure(state: State, instance: Instance, reason: Reason, now: float) -> None:
    """Counts a failed load; after the last try, refuses the waiting requests unless other instances serve them."""
    version_id, is_lost = instance.version_id, reason.cause == STORE_LOST
    is_of_store = is_lost or "store" in reason.figures
    if is_lost and (worker := state.membership.workers.get(instance.worker_id)) is not None:
        workers = state.membership.workers.values()
        state.avoided_workers.store_lost((each.worker_id for each in workers if each.host_id == worker.host_id), now)
    decided_at = instance.created_at
    if not is_of_store:
        state.avoided_workers.load_failed(instance.worker_id, now)
    failures = state.versions.of(version_id).failures
    if failures.add(reason.text, decided_at, now, state.config, is_of_store=is_of_store):
        for admission in state.queues.waiting(version_id):
            if not is_of_store or now - admission.admitted_at > state.config.load_backoff_max_s:
                lifecycle.refuse_if_given_up(state, admission, now)


def _ready_reason(instance: Instance, took_s: float) -> Reason:
    layers = f"all {instance.num_layers} layers" if instance.num_layers > 1 else "all"
    text = f"{layers} loaded in {format_duration(took_s)}"
    figures: dict[str, str | int | float] = {"num_layers": instance.num_layers}
    for worker_id, (number, saved_s) in instance.prompt_moves.items():
        text += (
            f"; {worker_id} took over {format_count(number, 'prompt')} with {format_duration(saved_s)} of computation"
        )
    if moves := instance.prompt_moves:
        figures["num_moved"] = sum(number for number, _ in moves.values())
    return Reason("loaded", text, figures)
