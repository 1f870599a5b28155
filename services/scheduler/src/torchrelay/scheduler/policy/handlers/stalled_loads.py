"""Detection of stalled loads: no bytes arrive any more, or the bytes that arrived are not loaded. A load that makes
progress may take any time.
"""

from __future__ import annotations

from torchrelay.scheduler.policy.autoscaling.load_progress import LoadMark
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.estimates.latency import load_s
from torchrelay.scheduler.policy.handlers.scaling import LOAD_STALLED
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Instance

_UNANSWERED_S = 1.0  # a load whose call ended without an answer, if accepted, appears in a report within this time


def detect(state: State, now: float) -> list[tuple[Instance, Reason]]:
    """Loading instances to give up, with the reason for each."""
    loading = state.instances.loading
    state.load_progress.keep({instance.instance_id for instance in loading})
    reasons = []
    for instance in loading:
        stopped_s = state.load_progress.observe(instance.instance_id, _mark(state, instance), now)
        if (reason := _reason(state, instance, stopped_s, now)) is not None:
            reasons.append((instance, reason))
    return reasons


def _mark(state: State, instance: Instance) -> LoadMark:
    worker, store = state.membership.workers.get(instance.worker_id), state.membership.store_of(instance.host_id)
    num_phases = len(worker.slot.load_phases) if worker is not None and instance.confirmed else 0
    copy = store.copies.get(instance.pack_id) if store is not None else None
    num_chunks = copy.num_chunks_verified if copy is not None else None
    return LoadMark(instance.accepted, num_phases, instance.num_layers_ready, num_chunks)


def _reason(state: State, instance: Instance, stopped_s: float, now: float) -> Reason | None:
    store, config = state.membership.store_of(instance.host_id), state.config
    if store is None:
        if stopped_s <= config.load_orphan_s:
            return None
        return Reason(LOAD_STALLED, f"the param-store of host {instance.host_id} does not answer")
    if not instance.accepted:
        if instance.unanswered_at and now - instance.unanswered_at > _UNANSWERED_S:
            return Reason(LOAD_STALLED, "the worker did not answer, and does not say that it loads")
        return None  # the Load call is under way and has its own deadline
    copy = store.copies.get(instance.pack_id)
    if copy is not None and copy.complete:
        if instance.loaded_share >= 1:
            return None  # its engine starts, and the worker reports whether that advances
        limit_s = max(config.load_stall_s, 2 * load_s(copy.pack_bytes, Tier.HOST, config))
        why = "its host has the pack, and no layer of it was loaded"
    else:
        limit_s, why = config.load_stall_s, "nothing of its pack arrived"
    return Reason(LOAD_STALLED, f"{why} for {limit_s:g} s") if stopped_s > limit_s else None
