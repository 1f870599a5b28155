"""The hosts that a model fits, and the step times that workers have learned of it or of another model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from torchrelay.control.v1 import reports_pb2, scheduler_pb2
from torchrelay.gateway.core import ModelShape, Version
from torchrelay.modelspec.sizing.footprint import Footprint, footprint_of_bytes
from torchrelay.modelspec.sizing.operating_point import Workload, latency_curve
from torchrelay.modelspec.sizing.roofline import LearnedSteps, LinearCost


def footprint_of_version(version: Version) -> Footprint:
    """The sizes that the catalog knows; experts count as if all were computed."""
    shape: ModelShape = version.shape
    kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.kv_dtype_bytes
    item_bytes = 1 if version.dtype == "I8" else shape.kv_dtype_bytes
    return footprint_of_bytes(version.pack_bytes, item_bytes, kv, shape.max_context_tokens)


def hosts_that_fit(cluster: scheduler_pb2.ClusterView, weights_bytes: float) -> tuple[int, int]:
    """The hosts with a slot whose memory holds the weights, and the hosts with any slot."""
    arenas = {store.host_id: store.arena_target_bytes for store in cluster.stores}
    slots = [(worker.host_id, worker.weights_bytes or arenas.get(worker.host_id, 0)) for worker in cluster.workers]
    fitting = {host_id for host_id, held_bytes in slots if min(held_bytes, arenas.get(host_id, 0)) >= weights_bytes}
    return len(fitting), len({host_id for host_id, _ in slots})


def learned_steps(
    cluster: scheduler_pb2.ClusterView, version_id: str, weights_bytes: float
) -> tuple[LearnedSteps, float] | None:
    """Steps of the version, or else of the model most like it in size, scaled by the weights; and the slots' KV pool in
    bytes. None if no worker has learned any.
    """
    own = [worker for worker in cluster.workers if worker.slot.version_id == version_id]
    if steps := _steps(own):
        return steps, _pool_bytes(own)
    sizes = {each.pack_id: each.pack_bytes for store in cluster.stores for each in store.copies}
    by_pack = defaultdict[str, list[reports_pb2.WorkerReport]](list)
    for worker in cluster.workers:
        if sizes.get(worker.slot.pack_id) and worker.latency.decode.num_steps:
            by_pack[worker.slot.pack_id].append(worker)
    if not by_pack or not weights_bytes:
        return None
    pack_id = min(by_pack, key=lambda each: abs(sizes[each] - weights_bytes))
    others = [worker for worker in cluster.workers if worker.slot.pack_id == pack_id]
    steps = _steps(others)
    return None if steps is None else (steps.of_size(weights_bytes / sizes[pack_id]), _pool_bytes(others))


def sizing_shown(
    footprint: Footprint, cluster: scheduler_pb2.ClusterView | None, version_id: str, work: Workload, *, is_admin: bool
) -> dict[str, Any]:
    """The footprint, the hosts for an operator, and what the learned steps give: null where nothing is learned."""
    cluster = cluster or scheduler_pb2.ClusterView()
    shown: dict[str, Any] = {"object": "sizing", "footprint": asdict(footprint), "steps": None, "curve": []}
    if is_admin:
        num_fitting, num_hosts = hosts_that_fit(cluster, footprint.weights_bytes)
        shown["hosts"] = {"fit": num_fitting, "total": num_hosts}
    if learned := learned_steps(cluster, version_id, footprint.weights_bytes):
        steps, pool_bytes = learned
        kv_tokens = pool_bytes / footprint.kv_bytes_per_token
        shown["steps"] = asdict(steps) | {"kv_pool_bytes": pool_bytes}
        shown["curve"] = [asdict(point) for point in latency_curve(steps, work, kv_tokens)]
    return shown


def _steps(workers: Sequence[reports_pb2.WorkerReport]) -> LearnedSteps | None:
    """The costs of each kind from the worker that has seen most such steps; None if none has decoded. Prefill costs as
    much per position as decoding until a worker has learned it.
    """
    decoding = max(workers, key=lambda each: each.latency.decode.num_steps, default=None)
    if decoding is None or not decoding.latency.decode.num_steps:
        return None
    prefilling = max(workers, key=lambda each: each.latency.prefill.num_steps).latency
    decode = _cost(decoding.latency.decode)
    prefill = _cost(prefilling.prefill) if prefilling.prefill.num_steps else decode
    return LearnedSteps(
        prefill, decode, (prefilling if prefilling.prefill.num_steps else decoding.latency).token_budget
    )


def _cost(cost: reports_pb2.StepCost) -> LinearCost:
    return LinearCost(cost.base_s, cost.per_position_s, cost.per_attended_s)


def _pool_bytes(workers: Iterable[reports_pb2.WorkerReport]) -> float:
    return median(worker.kv_pool_bytes for worker in workers)
