"""The hosts that a model fits, and the step times that workers have learned of it or of another model."""

from __future__ import annotations

from collections.abc import Container
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
    cluster: scheduler_pb2.ClusterView, version_id: str, weights_bytes: float, own_versions: Container[str] | None
) -> LearnedSteps | None:
    """Steps of the version, or else of the model most like it in size, scaled by the weights; None if no worker has
    learned any. ``own_versions``: a tenant's, of which alone it sees the steps; None: all.
    """
    learned = {each.version_id: each for each in cluster.versions if each.latency.decode.num_steps}
    if (own := learned.get(version_id)) is not None:
        return _steps(own.latency)
    sizes = {each.pack_id: each.pack_bytes for store in cluster.stores for each in store.copies}
    others = [
        each
        for each in learned.values()
        if sizes.get(each.pack_id) and (own_versions is None or each.version_id in own_versions)
    ]
    if not others or not weights_bytes:
        return None
    nearest = min(others, key=lambda each: abs(sizes[each.pack_id] - weights_bytes))
    return _steps(nearest.latency).of_size(weights_bytes / sizes[nearest.pack_id])


def sizing_shown(
    footprint: Footprint,
    cluster: scheduler_pb2.ClusterView | None,
    version_id: str,
    work: Workload,
    own_versions: Container[str] | None,
) -> dict[str, Any]:
    """The footprint, the hosts for an operator, and what the learned steps give: null where nothing is learned.
    ``own_versions``: a tenant's; None for an operator.
    """
    cluster = cluster or scheduler_pb2.ClusterView()
    shown: dict[str, Any] = {"object": "sizing", "footprint": asdict(footprint), "steps": None, "curve": []}
    if own_versions is None:
        num_fitting, num_hosts = hosts_that_fit(cluster, footprint.weights_bytes)
        shown["hosts"] = {"fit": num_fitting, "total": num_hosts}
    if cluster.workers and (steps := learned_steps(cluster, version_id, footprint.weights_bytes, own_versions)):
        pool_bytes = median(worker.kv_pool_bytes for worker in cluster.workers)
        kv_tokens = pool_bytes / footprint.kv_bytes_per_token
        shown["steps"] = asdict(steps) | {"kv_pool_bytes": pool_bytes}
        shown["curve"] = [asdict(point) for point in latency_curve(steps, work, kv_tokens)]
    return shown


def _steps(latency: reports_pb2.LatencyModel) -> LearnedSteps:
    """The learned costs; a position of a prompt costs as much as one that decodes until it is known."""
    decode = _cost(latency.decode)
    prefill = _cost(latency.prefill) if latency.prefill.num_steps else decode
    return LearnedSteps(prefill, decode, latency.token_budget)


def _cost(cost: reports_pb2.StepCost) -> LinearCost:
    return LinearCost(cost.base_s, cost.per_position_s, cost.per_attended_s)
