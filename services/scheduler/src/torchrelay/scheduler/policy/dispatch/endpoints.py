"""Refreshes the instances of a version that take requests, for dispatch."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.version_endpoints import VersionEndpoints
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.storage_tiers import tier_of
from torchrelay.scheduler.policy.types import InstancePhase, Model, Role, WorkerRef, WorkerStatus

_NONE = VersionEndpoints(())


def of_version(state: State, model: Model, now: float) -> VersionEndpoints:
    """The instances of the version that take requests."""
    version = state.versions.of(model.version_id)
    endpoints = version.endpoints
    if endpoints is None:
        instances = [each for each in state.instances.of_version(model.version_id) if _refresh(state, model, each, now)]
        if not instances:
            return _NONE
        endpoints = version.endpoints = VersionEndpoints(instances)
    elif endpoints.has_old_loads:
        predict_loads(state, model, endpoints, now)
    return endpoints


def _refresh(state: State, model: Model, instance: Instance, now: float) -> bool:
    """Notes what the instance's worker reported last. Returns whether the instance takes requests."""
    worker = state.membership.workers.get(instance.worker_id)
    if not instance.placeable or worker is None or state.membership.is_suspect(worker.worker_id):
        return False
    instance.worker_ref = WorkerRef(worker.worker_id, worker.grpc_address, instance.instance_id)
    instance.plays_prefill, instance.plays_decode = instance.plays(Role.PREFILL), instance.plays(Role.DECODE)
    instance.latency = state.latency_models.of(worker, model.pack_id, state.config)
    instance.full_step_s = instance.latency.queued_s(instance.latency.token_budget)
    instance.kv_pool_bytes, instance.hands_over = worker.kv_pool_bytes, worker.hands_over
    _predict_load(state, model, instance, now)
    return True


def predict_loads(state: State, model: Model, endpoints: VersionEndpoints, now: float) -> None:
    """Predicts again when the loading instances will be loaded."""
    endpoints.has_old_loads = False
    for instance in endpoints.all:
        if instance.is_loading:
            _predict_load(state, model, instance, now)
            if endpoints.index is not None:
                endpoints.index.change(instance)


def _predict_load(state: State, model: Model, instance: Instance, now: float) -> None:
    worker = state.membership.workers[instance.worker_id]
    instance.loaded_at = now + _load_left_s(state, model, instance, now, by_layer=worker.computes_by_layer)
    instance.load_s, instance.num_layer_steps = 0.0, 1
    if worker.computes_by_layer:
        instance.load_s = instance.loaded_at - instance.created_at if instance.num_layers_ready else 0.0
        instance.num_layer_steps = max(instance.num_layers, 1)


def _load_left_s(state: State, model: Model, instance: Instance, now: float, *, by_layer: bool) -> float:
    """``by_layer``: the layers that are loaded tell when the engine will begin."""
    if not instance.is_loading:
        return 0.0
    expected_s = state.config.slot_setup_s
    if store := state.membership.store_of(instance.host_id):
        tier = tier_of(model.pack_id, store, state.membership.is_held(model.pack_id))
        expected_s = state.load_times.predict_s(model, tier, state.config)
    return instance.predict_load_s(expected_s, now, by_layer=by_layer)


def forget(state: State, before: WorkerStatus | None, worker: WorkerStatus, instance: Instance) -> None:
    """Forgets the version's endpoints if the worker's report differs from that of ``before`` in what the instance can
    take. If the version has loading instances, their load times are predicted again.
    """
    if before is None or not _computes_alike(before, worker):
        state.forget_endpoints(instance.version_id)
    elif instance.version_id in state.instances.loading_versions:
        state.loads_changed(instance.version_id)


def _computes_alike(before: WorkerStatus, after: WorkerStatus) -> bool:
    """Whether both reports tell the same of an instance, apart from the progress of a load."""
    return (
        (before.incarnation, before.grpc_address, before.device)
        == (after.incarnation, after.grpc_address, after.device)
        and (before.kv_pool_bytes, before.hands_over) == (after.kv_pool_bytes, after.hands_over)
        and (before.step_s, before.prefill_tokens_per_s) == (after.step_s, after.prefill_tokens_per_s)
        and (before.latency is after.latency or before.latency == after.latency)
    )


def loading_prefills(state: State, model: Model, now: float) -> Sequence[Instance] | None:
    """The instances of the version that take prompts if all of them load, with new predictions of their load times;
    None if one is loaded.
    """
    if any(instance.phase is InstancePhase.READY for instance in state.instances.of_version(model.version_id)):
        return None
    endpoints = of_version(state, model, now)
    if endpoints is not _NONE:
        predict_loads(state, model, endpoints, now)
    return endpoints.prefills
