"""The life of an admission: admit -> (wait) -> placed -> released. Idempotent: a key counts once."""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.common.latency.latency_model import attended_positions
from torchrelay.scheduler.policy import effects
from torchrelay.scheduler.policy.cluster.storage_tiers import tier_of
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.core import (
    BOTH,
    Admission,
    AttemptKey,
    Instance,
    InstancePhase,
    Model,
    Placement,
    Role,
)
from torchrelay.scheduler.policy.dispatch.latency import load_left_s, load_s
from torchrelay.scheduler.policy.dispatch.placement import Candidate, NoPlacement, place
from torchrelay.scheduler.policy.dispatch.reservations import OpenAttempt
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.state import State

_RETRY_AFTER_S = (1.0, 60.0)


def admit(state: State, admission: Admission, model: Model, current: Placement | None, now: float) -> bool:
    """Accepts an admission. True if it waits now, for the first time or still."""
    key = admission.key
    state.gateways.confirm(admission.gateway_id, key)
    state.note_model(model, now)
    _suspect_failed_workers(state, admission, now)
    if opened := state.reservations.get(key):
        if current is None:
            state.effects.answers.append(effects.Placed(admission.gateway_id, opened.placement))
        return False
    if key in state.queues:
        return True
    if current is not None:
        _open(state, admission, current, now)  # placed by an earlier scheduler: it runs and needs no answer
        return False
    if state.queues.is_full(model.version_id):
        retry_s = min(max(predicted_wait_s(state, model, now), _RETRY_AFTER_S[0]), _RETRY_AFTER_S[1])
        tenant = tenant_of(model.name)
        own = sum(tenant_of(each.model) == tenant for each in state.queues.waiting(model.version_id))
        message = f"The queue of {model.name} is full (your requests in it: {own})."
        refuse(state, admission, effects.RefusalReason.QUEUE_FULL, message, now, retry_s)
        return False
    state.queues.push(admission)
    return True


def _suspect_failed_workers(state: State, admission: Admission, now: float) -> None:
    """Workers that failed the request are not used until they report again.

    A gateway may know of a failure first: when a load fails, its attempts end and return within a millisecond.
    """
    for worker_id in admission.lost_workers:
        state.membership.suspect(worker_id, now)
    for instance_id in state.instances_without_token.pop(admission.key.request_id, ()):
        if instance := state.instances.get(instance_id):
            state.membership.suspect(instance.worker_id, now)


def send_waiting(state: State, admission: Admission, now: float) -> None:
    """Answers that the request waits, if it still does."""
    if admission.key not in state.queues:
        return
    version_id, position = admission.version_id, state.queues.position(admission.key)
    loading = any(instance.phase is InstancePhase.LOADING for instance in state.instances.of_version(version_id))
    wait_s = predicted_wait_s(state, state.models[version_id], now)
    answer = effects.Waiting(admission.gateway_id, admission.key, position, "loading" if loading else "queued", wait_s)
    state.effects.answers.append(answer)


def withdraw(state: State, key: AttemptKey, now: float) -> None:
    """The client left. If a placement crossed the withdrawal, its resources are released."""
    if admission := state.queues.remove(key):
        message = "The request was withdrawn."
        refusal = effects.AdmissionRefused(admission.gateway_id, key, effects.RefusalReason.WITHDRAWN, message)
        state.effects.answers.append(refusal)
    release(state, key, now)


def release(state: State, key: AttemptKey, now: float) -> OpenAttempt | None:
    """The attempt is over, whether it waited or ran."""
    state.gateways.forget(key)
    state.queues.remove(key)
    attempt = state.reservations.close(key)
    if attempt is not None:
        state.aliases.used(attempt.admission.version_id, attempt.admission.model, now)
        for instance_id in attempt.instance_ids:
            state.instances.touch(instance_id, now)
    return attempt


def observe_outcome(state: State, attempt: OpenAttempt, outcome: Outcome) -> None:
    """Learns from the KV transfer time; workers learn their step times themselves."""
    model, admission = state.models.get(attempt.admission.version_id), attempt.admission
    workers = state.membership.workers
    prefill = workers.get(attempt.placement.prefill.worker_id)
    decode = workers.get(attempt.placement.decode.worker_id)
    if outcome.kv_transfer_s is None or model is None or prefill is None or decode is None or prefill is decode:
        return
    kv_bytes = admission.num_prefill_tokens * model.kv_bytes_per_token
    state.kv_transfer_times.observe(prefill.host_id, decode.host_id, kv_bytes, outcome.kv_transfer_s)


def refuse(
    state: State,
    admission: Admission,
    reason: effects.RefusalReason,
    message: str,
    now: float,
    retry_after_s: float = 0.0,
) -> None:
    release(state, admission.key, now)
    refusal = effects.AdmissionRefused(admission.gateway_id, admission.key, reason, message, retry_after_s)
    state.effects.answers.append(refusal)
    state.effects.events.append(effects.SchedulerEvent(now, "refuse", admission.model, admission.model, message))


def refuse_infeasible(state: State, now: float) -> None:
    """Refuses all waiting requests that no slot can ever serve."""
    for admission in list(state.queues):
        refuse_if_infeasible(state, admission, now)


def refuse_if_infeasible(state: State, admission: Admission, now: float) -> None:
    """Refuses a waiting request that no slot can ever serve; shortly after a start, slots may still appear."""
    if now - state.started_at < state.config.refusal_settle_s or not state.largest_slot_bytes:
        return
    model, available = state.models[admission.version_id], state.largest_slot_bytes
    needed, pool = admission.kv_bytes(model), state.largest_kv_pool_bytes
    if model.pack_bytes > available:
        weights = f"The weights of {admission.model} take {model.pack_bytes:,} bytes"
        message = f"{weights}; the largest slot holds {available:,}."
    elif needed > pool:
        message = f"The request needs {needed:,} bytes of KV to its last token; the largest pool has {pool:,}."
    else:
        return
    refuse(state, admission, effects.RefusalReason.NO_CAPACITY, message, now)


def refuse_unserved(state: State, now: float) -> None:
    """Refuses requests that need a load when, for some time now, no model can be loaded anywhere.

    As long as one can, waiting is a matter of turns. A request that has given tokens already waits longer.
    """
    why = state.membership.why_no_load()
    if not why:
        state.unserved_since = None
        return
    if state.unserved_since is None:
        state.unserved_since = now
    for admission in list(state.queues):
        limit_s = state.config.unserved_resumed_s if admission.num_forced_tokens else state.config.unserved_s
        if now - state.unserved_since >= limit_s and not _has_served_roles(state, admission.version_id):
            message = f"{admission.model} cannot be loaded: {why}."
            refuse(state, admission, effects.RefusalReason.LOAD_FAILED, message, now, limit_s)


def _has_served_roles(state: State, version_id: str) -> bool:
    """Whether the workers of its instances can play both roles between them."""
    staying = (instance for instance in state.instances.of_version(version_id) if instance.staying)
    workers = (state.membership.workers.get(instance.worker_id) for instance in staying)
    return frozenset(role for worker in workers if worker for role in worker.playable_roles) >= BOTH


def place_waiting(state: State, now: float, version_ids: Iterable[str] | None = None) -> None:
    """Places waiting requests in order of arrival, until the first finds no place."""
    for version_id in state.queues.versions if version_ids is None else version_ids:
        model = state.models.get(version_id)
        if model is None or not state.queues.num_waiting(version_id):
            continue
        instances = [instance for instance in state.instances.of_version(version_id) if instance.placeable]
        for admission in state.queues.waiting(version_id) if instances else ():
            if not state.gateways.is_confirmed(admission.key):
                continue  # its gateway is away; it keeps its position
            found = candidates(state, admission, model, instances, now)
            placement = place(admission, model, found, state.kv_transfer_times, state.config)
            if isinstance(placement, NoPlacement):
                break
            key, model_name, admitted_at = admission.key, admission.model, admission.admitted_at
            state.queues.remove(key)
            _open(state, admission, placement, now)
            state.effects.answers.append(effects.Placed(admission.gateway_id, placement))
            placed = effects.AttemptPlaced(key, model_name, admitted_at, now, placement, admission.traceparent)
            state.effects.opened.append(placed)


def _open(state: State, admission: Admission, placement: Placement, now: float) -> None:
    model = state.models[admission.version_id]
    state.reservations.open(OpenAttempt(admission, placement, now, admission.kv_bytes(model)))
    for worker_ref in (placement.prefill, placement.decode):
        state.instances.touch(worker_ref.instance_id, now)
    worker = state.membership.workers.get(placement.prefill.worker_id)
    if worker is not None and worker.has_prefix_cache and model.routing_block_tokens:
        block_bytes = max(model.routing_block_tokens * model.kv_bytes_per_token, 1)
        max_blocks = worker.kv_pool_bytes // block_bytes
        state.prefix_index.note(placement.prefill.instance_id, admission.block_hashes, max_blocks)


def candidates(
    state: State, admission: Admission, model: Model, instances: Iterable[Instance], now: float
) -> list[Candidate]:
    """The instances that may serve ``admission``, with what its placement depends on."""
    found = []
    for instance in instances:
        worker = state.membership.workers.get(instance.worker_id)
        if worker is None or state.membership.is_suspect(worker.worker_id):
            continue
        reserved_bytes = state.reservations.reserved_bytes(instance.instance_id)
        latency = state.latency_models.of(worker, model.pack_id, state.config)
        num_blocks = state.prefix_index.num_blocks(instance.instance_id, admission.block_hashes)
        candidate = Candidate(
            instance=instance,
            worker=worker,
            latency=latency,
            load_left_s=_load_left_s(state, model, instance, now),
            queue_s=state.queue_s(instance, latency),
            kv_unreserved_bytes=worker.kv_pool_bytes - reserved_bytes,
            num_open=state.reservations.num_decoding(instance.instance_id),
            num_decoding=state.reservations.num_choices(instance.instance_id),
            num_decode_attended=reserved_bytes // max(model.kv_bytes_per_token, 1),
            num_cached_tokens=num_blocks * model.routing_block_tokens,
        )
        found.append(candidate)
    return found


def _load_left_s(state: State, model: Model, instance: Instance, now: float) -> float:
    if instance.phase is not InstancePhase.LOADING:
        return 0.0
    expected_s = state.config.slot_setup_s
    if store := state.membership.store_of(instance.host_id):
        tier = tier_of(model.pack_id, store, state.membership.stores.values())
        expected_s = load_s(model.pack_bytes, tier, state.config)
    return load_left_s(instance, expected_s, now)


def predicted_wait_s(state: State, model: Model, now: float) -> float:
    """Until a request that arrives now gets its first token: load left, and the prompts ahead."""
    instances = [instance for instance in state.instances.of_version(model.version_id) if instance.staying]
    prefills = [instance for instance in instances if instance.plays(Role.PREFILL)]
    waiting = state.queues.waiting(model.version_id)
    if not prefills:
        ahead = sum(admission.num_prefill_tokens for admission in waiting)
        ahead_s = ahead / state.config.default_prefill_tokens_per_s
        return state.config.slot_setup_s + model.pack_bytes / state.config.relay_bytes_per_s + ahead_s
    # Summed once: this runs for every request that arrives while others wait.
    num_tokens = sum(each.num_prefill_tokens for each in waiting)
    num_attended = sum(each.num_contexts * attended_positions(0, each.num_context_tokens) for each in waiting)
    backlog_s = [
        state.queue_s(instance, latency) + latency.queued_s(num_tokens, num_attended) / len(prefills)
        for instance in prefills
        if (worker := state.membership.workers.get(instance.worker_id))
        and (latency := state.latency_models.of(worker, model.pack_id, state.config))
    ]
    load_s_left = min(_load_left_s(state, model, instance, now) for instance in prefills)
    return load_s_left + min(backlog_s, default=0.0)
