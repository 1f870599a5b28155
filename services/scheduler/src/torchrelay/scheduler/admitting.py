"""The life of an admission: admit -> (wait) -> placed -> released. Each key once, however often it is sent."""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.common.latency_model import seen_by
from torchrelay.scheduler.books import OpenAttempt
from torchrelay.scheduler.core import Admission, AttemptKey, Instance, Model, Phase, Placement, Role, Worker
from torchrelay.scheduler.dispatch import Candidate, NoPlace, place
from torchrelay.scheduler.effects import Answer, Happening, Opened, Placed, RefusalReason, Refused, Waits
from torchrelay.scheduler.latency import load_left_s, load_s
from torchrelay.scheduler.namesakes import tenant_of
from torchrelay.scheduler.prediction import Outcome
from torchrelay.scheduler.state import State
from torchrelay.scheduler.tiers import tier_of

_RETRY_AFTER_S = (1.0, 60.0)


def admit(state: State, admission: Admission, model: Model, current: Placement | None, now: float) -> bool:
    """Takes an admission in. True when it waits now, for the first time or still: it may be served."""
    key = admission.key
    state.gateways.confirm(admission.gateway_id, key)
    state.note_model(model, now)
    _doubt(state, admission, now)
    if opened := state.books.get(key):
        if current is None:
            _answer(state, Placed(admission.gateway_id, opened.placement))
        return False
    if key in state.queues:
        return True
    if current is not None:
        _open(state, admission, current, now)  # placed by an earlier scheduler: it runs, nothing is to be answered
        return False
    if state.queues.is_full(model.version_id):
        retry_s = min(max(predicted_wait_s(state, model, now), _RETRY_AFTER_S[0]), _RETRY_AFTER_S[1])
        tenant = tenant_of(model.name)
        own = sum(tenant_of(each.model) == tenant for each in state.queues.waiting(model.version_id))
        message = f"The queue of {model.name} is full (your requests in it: {own})."
        refuse(state, admission, RefusalReason.QUEUE_FULL, message, now, retry_s)
        return False
    state.queues.push(admission)
    return True


def _doubt(state: State, admission: Admission, now: float) -> None:
    """Workers that failed the request are not used until they have reported again.

    A gateway may know of a failure before we do: when a load breaks, its attempts end and come again in a millisecond.
    """
    for worker_id in admission.lost_workers:
        state.view.suspect(worker_id, now)
    for instance_id in state.fruitless.pop(admission.key.request_id, frozenset()):
        if instance := state.fleet.get(instance_id):
            state.view.suspect(instance.worker_id, now)


def say_waits(state: State, admission: Admission, now: float) -> None:
    """Tells the gateway that the request waits, if it still does."""
    if admission.key in state.queues:
        _answer(state, _waits(state, admission, now))


def withdraw(state: State, key: AttemptKey, now: float) -> None:
    """The client left. If a placement crossed the withdrawal, its resources are free again."""
    admission = state.queues.remove(key)
    if admission is not None:
        _answer(state, Refused(admission.gateway_id, key, RefusalReason.WITHDRAWN, "The request was withdrawn."))
    release(state, key, now)


def release(state: State, key: AttemptKey, now: float) -> OpenAttempt | None:
    """The attempt is over, wherever it stood."""
    state.gateways.forget(key)
    state.queues.remove(key)
    attempt = state.books.close(key)
    if attempt is not None:
        state.namesakes.used(attempt.admission.version_id, attempt.admission.model, now)
        for instance_id in attempt.instance_ids:
            state.fleet.touch(instance_id, now)
    return attempt


def learn(state: State, attempt: OpenAttempt, outcome: Outcome) -> None:
    """Takes in how long the hand-over took; what steps take the workers learn themselves."""
    model, admission = state.models.get(attempt.admission.version_id), attempt.admission
    workers = state.view.workers
    prefill = workers.get(attempt.placement.prefill.worker_id)
    decode = workers.get(attempt.placement.decode.worker_id)
    if outcome.handover_s is None or model is None or prefill is None or decode is None or prefill is decode:
        return
    kv_bytes = admission.num_prefill_tokens * model.kv_bytes_per_token
    state.handovers.observe(prefill.host_id, decode.host_id, kv_bytes, outcome.handover_s)


def refuse(
    state: State, admission: Admission, reason: RefusalReason, message: str, now: float, retry_after_s: float = 0.0
) -> None:
    release(state, admission.key, now)
    _answer(state, Refused(admission.gateway_id, admission.key, reason, message, retry_after_s))
    told = Happening(now, "refuse", admission.model, admission.model, message)
    state.effects.happenings.append(told)


def refuse_impossible(state: State, now: float) -> None:
    """Refuses all waiting requests that no slot could ever take."""
    for admission in list(state.queues):
        refuse_if_impossible(state, admission, now)


def refuse_if_impossible(state: State, admission: Admission, now: float) -> None:
    """Refuses a waiting request that no slot could ever take; slots may still show up shortly after a start."""
    if now - state.started_at < state.rules.refusal_settle_s or not state.largest_slot_bytes:
        return
    if message := _impossible(state, state.models[admission.version_id], admission):
        refuse(state, admission, RefusalReason.NO_CAPACITY, message, now)


def _impossible(state: State, model: Model, admission: Admission) -> str:
    available = state.largest_slot_bytes
    if model.pack_bytes > available:
        weights = f"The weights of {admission.model} take {model.pack_bytes:,} bytes"
        return f"{weights}; the largest slot holds {available:,}."
    needed, pool = admission.kv_bytes(model), state.largest_kv_pool_bytes
    if needed > pool:
        return f"The request needs {needed:,} bytes of KV to its last token; the largest pool has {pool:,}."
    return ""


def serve(state: State, now: float, version_ids: Iterable[str] | None = None) -> None:
    """Places waiting requests, first come first, for as long as there is a place for the first."""
    for version_id in state.queues.versions if version_ids is None else version_ids:
        model = state.models.get(version_id)
        if model is None or not state.queues.num_waiting(version_id):
            continue
        instances = [instance for instance in state.fleet.of_version(version_id) if instance.placeable]
        for admission in state.queues.waiting(version_id) if instances else ():
            if not state.gateways.is_confirmed(admission.key):
                continue  # its gateway is away; it keeps its turn
            found = candidates(state, admission, model, instances, now)
            placement = place(admission, model, found, state.handovers, state.rules)
            if isinstance(placement, NoPlace):
                break
            state.queues.remove(admission.key)
            _open(state, admission, placement, now)
            _answer(state, Placed(admission.gateway_id, placement))
            state.effects.opened.append(
                Opened(admission.key, admission.model, admission.admitted_at, now, placement, admission.traceparent)
            )


def _open(state: State, admission: Admission, placement: Placement, now: float) -> None:
    model = state.models[admission.version_id]
    state.books.open(OpenAttempt(admission, placement, now, admission.kv_bytes(model)))
    for seat in (placement.prefill, placement.decode):
        state.fleet.touch(seat.instance_id, now)
    worker = state.view.workers.get(placement.prefill.worker_id)
    if worker is not None and worker.keeps_prefixes and model.routing_block_tokens:
        block_bytes = max(model.routing_block_tokens * model.kv_bytes_per_token, 1)
        max_blocks = worker.kv_pool_bytes // block_bytes
        state.prefixes.note(placement.prefill.instance_id, admission.block_hashes, max_blocks)


def candidates(
    state: State, admission: Admission, model: Model, instances: Iterable[Instance], now: float
) -> list[Candidate]:
    """The instances requests may be sent to, with what a placement of ``admission`` has to weigh."""
    return [
        _candidate(state, admission, model, instance, worker, now)
        for instance in instances
        if (worker := state.view.workers.get(instance.worker_id)) and not state.view.is_suspect(worker.worker_id)
    ]


def _candidate(
    state: State, admission: Admission, model: Model, instance: Instance, worker: Worker, now: float
) -> Candidate:
    reserved_bytes = state.books.reserved_bytes(instance.instance_id)
    latency = state.latencies.of(worker, model.pack_id, state.rules)
    num_blocks = state.prefixes.num_blocks(instance.instance_id, admission.block_hashes)
    return Candidate(
        instance=instance,
        worker=worker,
        latency=latency,
        load_left_s=_load_left_s(state, model, instance, now),
        queue_s=state.queue_s(instance, latency),
        kv_unreserved_bytes=worker.kv_pool_bytes - reserved_bytes,
        num_open=state.books.num_decoding(instance.instance_id),
        num_decoding=state.books.num_choices(instance.instance_id),
        num_decode_seen=reserved_bytes // max(model.kv_bytes_per_token, 1),
        num_cached_tokens=num_blocks * model.routing_block_tokens,
    )


def _load_left_s(state: State, model: Model, instance: Instance, now: float) -> float:
    if instance.phase is not Phase.LOADING:
        return 0.0
    store = state.view.store_of(instance.host_id)
    if store is None:
        return load_left_s(instance, state.rules.slot_setup_s, now)
    tier = tier_of(model.pack_id, store, state.view.stores.values())
    return load_left_s(instance, load_s(model.pack_bytes, tier, state.rules), now)


def predicted_wait_s(state: State, model: Model, now: float) -> float:
    """Until a request that arrives now gets its first token: load left, and the prompts before it."""
    instances = [instance for instance in state.fleet.of_version(model.version_id) if instance.staying]
    prefills = [instance for instance in instances if instance.plays(Role.PREFILL)]
    waiting = state.queues.waiting(model.version_id)
    if not prefills:
        ahead = sum(admission.num_prefill_tokens for admission in waiting)
        ahead_s = ahead / state.rules.default_prefill_tokens_per_s
        return state.rules.slot_setup_s + model.pack_bytes / state.rules.relay_bytes_per_s + ahead_s
    # Summed once: this is asked for every request that comes while others wait.
    num_tokens = sum(each.num_prefill_tokens for each in waiting)
    num_seen = sum(each.num_contexts * seen_by(0, each.num_context_tokens) for each in waiting)
    backlog_s = [
        state.queue_s(instance, latency) + latency.line_s(num_tokens, num_seen) / len(prefills)
        for instance in prefills
        if (worker := state.view.workers.get(instance.worker_id))
        and (latency := state.latencies.of(worker, model.pack_id, state.rules))
    ]
    load_s_left = min(_load_left_s(state, model, instance, now) for instance in prefills)
    return load_s_left + min(backlog_s, default=0.0)


def _waits(state: State, admission: Admission, now: float) -> Waits:
    version_id = admission.version_id
    loading = any(instance.phase is Phase.LOADING for instance in state.fleet.of_version(version_id))
    return Waits(
        admission.gateway_id,
        admission.key,
        state.queues.position(admission.key),
        "loading" if loading else "queued",
        predicted_wait_s(state, state.models[version_id], now),
    )


def _answer(state: State, answer: Answer) -> None:
    state.effects.answers.append(answer)
