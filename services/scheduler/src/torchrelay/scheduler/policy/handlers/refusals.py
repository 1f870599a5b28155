"""Refusal of requests that no slot can serve any more, or for which nothing can be loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

from torchrelay.common.quantities import format_count, format_duration
from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.cluster.slot_sizes import largest_pool
from torchrelay.scheduler.policy.config import ScalingMode
from torchrelay.scheduler.policy.handlers import pools
from torchrelay.scheduler.policy.handlers.lifecycle import refuse
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import BOTH, Admission, Caps, Model, SlotClass

_SWEEP_S = 10.0  # waiting requests are checked for this long after a reason to refuse them: ticks may be late


def refuse_infeasible(state: State, now: float) -> None:
    """Refuses waiting requests that no slot can serve any more. Requests that no slot ever could are refused at
    once.
    """
    config = state.config
    since_start_s, absent_s = now - state.started_at, max(config.unserved_s, config.unserved_resumed_s)
    is_settling = since_start_s < config.refusal_settle_s + _SWEEP_S
    if not _knows_slots(state, now):
        return
    are_slots_new = is_settling or state.membership.sizes.has_lost_any(now - absent_s - _SWEEP_S)
    largest_slot = cache(partial(_largest_slot, state, now))  # thousands of requests have few sizes
    for version_id in list(state.queues.versions):
        model = state.known_model(version_id)
        version = state.versions.of(version_id)
        if not (are_slots_new or version.has_new_caps):
            continue
        version.has_new_caps, capped = False, version.aliases.capped
        for admission in state.queues.waiting(version_id):
            _refuse_if_infeasible(state, admission, model, capped, largest_slot, now)


def refuse_if_infeasible(state: State, admission: Admission, now: float) -> None:
    """Refuses a waiting request that no slot can serve and none could for some time. Never shortly after a start, when
    slots may still appear, nor without any slot, for which ``refuse_unserved`` gives the reason.
    """
    if _knows_slots(state, now):
        model = state.known_model(admission.version_id)
        capped = state.versions.of(admission.version_id).aliases.capped
        _refuse_if_infeasible(state, admission, model, capped, partial(_largest_slot, state, now), now)


def _knows_slots(state: State, now: float) -> bool:
    return now - state.started_at >= state.config.refusal_settle_s and state.membership.sizes.has_weights


def _largest_slot(state: State, now: float, wanted: SlotClass, absent_s: float) -> tuple[int, int]:
    """The most bytes of weights and of KV that a slot holds, among present slots and those of ``absent_s`` ago."""
    slots = state.membership.sizes.since(now - absent_s, wanted)
    return max((slot.weights_bytes for slot in slots), default=0), largest_pool(slots)


def _refuse_if_infeasible(
    state: State,
    admission: Admission,
    model: Model,
    capped: Mapping[str, Caps],
    largest_slot: Callable[[SlotClass, float], tuple[int, int]],
    now: float,
) -> None:
    arena, pool = largest_slot(model.slot_class, absence_limit_s(state, admission))
    needed, reason = admission.kv_bytes(model), effects.RefusalReason.NO_CAPACITY
    if not arena and model.hosts:
        engine = f", with the engine {model.engine}" if model.engine else ""
        message = f"{admission.model} needs a worker on {_host_text(state, admission, model)}{engine}"
        message += "; no worker is there"
    elif not arena and model.engine:
        on = f" on {model.num_devices} devices" if model.num_devices > 1 else ""
        message = f"{admission.model} needs a worker with the engine {model.engine}{on}; no worker has it"
    elif not arena:
        message = f"{admission.model} needs a slot of {format_count(model.num_devices, 'device')}; no worker has one"
    elif model.pack_bytes > arena:
        weights = f"the weights of {admission.model} take {model.pack_bytes:,} bytes"
        message = f"{weights}; the largest slot holds {arena:,}"
    elif needed > pool > 0:
        message = f"the request needs {needed:,} bytes of KV to its last token; the largest pool has {pool:,}: "
        message += "shorten the prompt or lower max_tokens"
        reason = effects.RefusalReason.TOO_LONG
    elif capped and pool and admission.model in capped and not capped[admission.model].holds(needed, pool):
        share = capped[admission.model].kv_share
        message = f"the request needs {needed:,} bytes of KV to its last token; the share of {admission.model} in the"
        message += (
            f" largest pool (kv_share {share:g}) has {int(share * pool):,}: shorten the prompt, lower max_tokens,"
        )
        message += " or have the platform's operator raise kv_share"
        reason = effects.RefusalReason.TOO_LONG
    else:
        return
    refuse(state, admission, reason, message, now)


def _host_text(state: State, admission: Admission, model: Model) -> str:
    """The labels that the request's own model sets, and not those of other tenants that share the version."""
    own = model.hosts & state.versions.of(model.version_id).aliases.labels_of(admission.model)
    return f"a host with the labels {', '.join(sorted(own))}" if own else "a host that the platform's operator chose"


def absence_limit_s(state: State, admission: Admission) -> float:
    """How long a request waits for missing capacity; a request that has output tokens already waits longer."""
    return state.config.unserved_resumed_s if admission.num_forced_tokens else state.config.unserved_s


def refuse_unserved(state: State, now: float) -> None:
    """Refuses requests that need a load if no model could be loaded anywhere for some time.

    As long as any model can be loaded, requests only wait for their turn; and while a launcher starts slots, for these,
    unless their start is overdue.
    """
    why = state.membership.why_no_load()
    if state.config.scaling is ScalingMode.ADVISE:
        why = "the scheduler only advises (scaling), and loads nothing beyond the minimums of models"
    if not why:
        state.unserved_since = None
        return
    if state.unserved_since is None:
        state.unserved_since = now
    is_overdue = state.slot_starts.is_overdue(now)
    if is_overdue:
        why += f", and no worker has started for {format_duration(state.slot_starts.limit_s)}"
        why += f": {state.launcher_waits}" if state.launcher_waits else ""
    for version_id in list(state.queues.versions):
        is_starting = pools.is_starting_slots(state, state.known_model(version_id).num_devices)
        if (is_starting and not is_overdue) or _has_served_roles(state, version_id):
            continue
        for admission in state.queues.waiting(version_id):
            if now - state.unserved_since >= (limit_s := absence_limit_s(state, admission)):
                message = f"{admission.model} cannot be loaded: {why}"
                refuse(state, admission, effects.RefusalReason.LOAD_FAILED, message, now, limit_s)


def _has_served_roles(state: State, version_id: str) -> bool:
    """Whether the workers of the version's instances can together play both roles."""
    staying = (instance for instance in state.instances.of_version(version_id) if instance.staying)
    workers = (state.membership.workers.get(instance.worker_id) for instance in staying)
    return frozenset(role for worker in workers if worker for role in worker.playable_roles) >= BOTH
