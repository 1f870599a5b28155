"""Loads that have stopped: nothing of the pack arrives any more. While bytes come, a load may take any time."""

from __future__ import annotations

from torchrelay.scheduler.policy.autoscaling.load_progress import LoadMark
from torchrelay.scheduler.policy.core import Instance, InstancePhase
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions.scaling import LOAD_STALLED


def stalled(state: State, now: float) -> list[tuple[Instance, Reason]]:
    """The loading instances to give up, and why."""
    loading = [instance for instance in state.instances if instance.phase is InstancePhase.LOADING]
    state.load_progress.keep({instance.instance_id for instance in loading})
    found = []
    for instance in loading:
        stopped_s = state.load_progress.observe(instance.instance_id, _mark(state, instance), now)
        if (reason := _reason(state, instance, stopped_s)) is not None:
            found.append((instance, reason))
    return found


def _mark(state: State, instance: Instance) -> LoadMark:
    worker, store = state.membership.workers.get(instance.worker_id), state.membership.store_of(instance.host_id)
    num_phases = len(worker.slot.load_phases) if worker is not None and instance.confirmed else 0
    copy = store.copies.get(instance.pack_id) if store is not None else None
    num_chunks = copy.num_chunks_verified if copy is not None else None
    return LoadMark(instance.accepted, num_phases, instance.num_layers_ready, num_chunks)


def _reason(state: State, instance: Instance, stopped_s: float) -> Reason | None:
    store, config = state.membership.store_of(instance.host_id), state.config
    if store is None:
        if stopped_s <= config.load_orphan_s:
            return None
        return Reason(LOAD_STALLED, f"the param-store of host {instance.host_id} does not answer")
    copy = store.copies.get(instance.pack_id)
    if not instance.accepted or (copy is not None and copy.complete):
        return None  # a call with a deadline of its own is under way; or nothing needs to arrive any more
    if stopped_s <= config.load_stall_s:
        return None
    return Reason(LOAD_STALLED, f"nothing of its pack arrived for {config.load_stall_s:g} s")
