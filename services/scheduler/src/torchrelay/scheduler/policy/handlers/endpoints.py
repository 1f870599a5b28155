"""The instances of a version that take requests, and the time left of their loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchrelay.scheduler.policy.cluster.storage_tiers import tier_of
from torchrelay.scheduler.policy.dispatch.endpoint import Endpoint, computes_alike
from torchrelay.scheduler.policy.estimates.latency import load_left_s
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Instance, InstancePhase, Model, Role, WorkerRef, WorkerStatus


def of_version(state: State, model: Model, now: float) -> Sequence[Endpoint]:
    """The instances of the version that take requests."""

    return state.endpoint_cache.of(
        model.version_id,
        lambda: _built(state, model, now),
        lambda entry: _with_load(state, model, entry, now),
    )


def _with_load(state: State, model: Model, entry: Endpoint, now: float) -> Endpoint:
    """The entry of a loading instance with the time of its load as predicted now."""
    instance = state.instances.get(entry.instance_id)
    assert instance is not None, "endpoints are forgotten when an instance goes"
    return replace(entry, **_load_of(state, model, instance, now))


def _built(state: State, model: Model, now: float) -> Iterator[Endpoint]:
    for instance in state.instances.of_version(model.version_id):
        worker = state.membership.workers.get(instance.worker_id)
        if not instance.placeable or worker is None or state.membership.is_suspect(worker.worker_id):
            continue
        latency = state.latency_models.of(worker, model.pack_id, state.config)
        yield Endpoint(
            worker_ref=WorkerRef(worker.worker_id, worker.grpc_address, instance.instance_id),
            host_id=instance.host_id,
            plays_prefill=instance.plays(Role.PREFILL),
            plays_decode=instance.plays(Role.DECODE),
            phase=instance.phase,
            latency=latency,
            kv_pool_bytes=worker.kv_pool_bytes,
            full_step_s=latency.queued_s(latency.token_budget),
            hands_over=worker.hands_over,
            **_load_of(state, model, instance, now),
        )


def forget(state: State, before: WorkerStatus | None, worker: WorkerStatus, instance: Instance) -> None:
    """Forgets the version's endpoints if the worker's report differs from that of ``before`` in what the instance can
    take. If the version has loading instances, their load times are predicted again.
    """
    if before is None or not computes_alike(before, worker):
        state.endpoint_cache.forget(instance.version_id)
    elif instance.version_id in state.instances.loading_versions:
        state.endpoint_cache.forget_loads(instance.version_id)


def _load_of(state: State, model: Model, instance: Instance, now: float) -> dict[str, Any]:
    """The fields of an endpoint that change while the instance loads."""
    loaded_at = now + _load_left_s(state, model, instance, now)
    worker = state.membership.workers.get(instance.worker_id)
    if worker is not None and not worker.computes_by_layer:
        return {"loaded_at": loaded_at}
    load_s = loaded_at - instance.created_at if instance.num_layers_ready else 0.0
    return {"loaded_at": loaded_at, "load_s": load_s, "num_layers": max(instance.num_layers, 1)}


def _load_left_s(state: State, model: Model, instance: Instance, now: float) -> float:
    if instance.phase is not InstancePhase.LOADING:
        return 0.0
    expected_s = state.config.slot_setup_s
    if store := state.membership.store_of(instance.host_id):
        tier = tier_of(model.pack_id, store, state.membership.is_held(model.pack_id))
        expected_s = state.load_times.predict_s(model, tier, state.config)
    worker = state.membership.workers.get(instance.worker_id)
    if worker is not None and not worker.computes_by_layer:
        instance = replace(instance, num_layers_ready=0)  # its layers tell nothing about the start of its engine
    return load_left_s(instance, expected_s, now)


def loading_prefills(state: State, model: Model, now: float) -> Sequence[Endpoint] | None:
    """The instances of the version that take prompts if all of them load, with the times of their loads as predicted
    now; None if one is loaded.
    """
    if any(instance.phase is InstancePhase.READY for instance in state.instances.of_version(model.version_id)):
        return None
    entries = prefills(state, model, now)
    return [_with_load(state, model, entry, now) for entry in entries]


def prefills(state: State, model: Model, now: float) -> Sequence[Endpoint]:
    """The instances of the version that take prompts."""
    of_version(state, model, now)
    return state.endpoint_cache.prefills(model.version_id)
