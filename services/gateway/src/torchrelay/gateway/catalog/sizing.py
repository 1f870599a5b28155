"""What the slots of the cluster give to a model: where it fits, and its learned step times."""

from __future__ import annotations

from collections.abc import Iterable
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
    learned = [worker for worker in cluster.workers if worker.latency.decode.num_steps]
    own = [worker for worker in learned if worker.slot.version_id == version_id]
    if own:
        # The worker that has seen most: another may have begun a moment ago.
        worker = max(own, key=lambda each: each.latency.decode.num_steps)
        return _steps(worker.latency), _pool_bytes(own)
    sizes = {each.pack_id: each.pack_bytes for store in cluster.stores for each in store.copies}
    known = [(sizes[each.slot.pack_id], each) for each in learned if sizes.get(each.slot.pack_id)]
    if not known or not weights_bytes:
        return None
    size, worker = min(known, key=lambda each: abs(each[0] - weights_bytes))
    return _steps(worker.latency).of_size(weights_bytes / size), _pool_bytes([worker])


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


def _steps(latency: reports_pb2.LatencyModel) -> LearnedSteps:
    """Prefill costs as much per position as decoding until a worker has learned it."""
    decode = _cost(latency.decode)
    prefill = _cost(latency.prefill) if latency.prefill.num_steps else decode
    return LearnedSteps(prefill, decode, latency.token_budget)


def _cost(cost: reports_pb2.StepCost) -> LinearCost:
    return LinearCost(cost.base_s, cost.per_position_s, cost.per_attended_s)


def _pool_bytes(workers: Iterable[reports_pb2.WorkerReport]) -> float:
    return median(worker.kv_pool_bytes for worker in workers)
