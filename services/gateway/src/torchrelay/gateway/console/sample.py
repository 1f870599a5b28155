"""Figures of a moment, and the part of them that a caller may see. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torchrelay.common.latency.bottleneck import ADVICE
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.gateway.console.core import Alert, Listed
from torchrelay.gateway.core import FirstToken, Principal

RATES_OVER_S = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of all tenants at a moment."""

    at_unix_s: float = 0.0
    settled: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # requests and tokens by tenant id
    models: Sequence[Listed] = ()
    first_tokens: Sequence[FirstToken] = ()
    cluster: scheduler_pb2.ClusterView | None = None  # None: the scheduler does not answer
    alerts: Sequence[Alert] = ()


def seen_by(caller: Principal, sample: Sample) -> dict[str, Any]:
    """Returns the figures that ``caller`` may see: all of them for an admin, a tenant's own for a tenant.

    Hosts, workers and what instances do for others are the operator's: tenants with equal uploads share instances.
    """

    def is_own(tenant_id: str) -> bool:
        return caller.is_admin or tenant_id == caller.tenant_id

    sums = [sums for tenant_id, sums in sample.settled.items() if is_own(tenant_id)]
    ttfts = sorted(each.ttft_s for each in sample.first_tokens if is_own(each.tenant_id))
    models = [model for model in sample.models if is_own(model.tenant_id)]
    cluster = sample.cluster or scheduler_pb2.ClusterView()
    ready = {instance.version_id for instance in cluster.instances if instance.state == "ready"}
    names: defaultdict[str, list[str]] = defaultdict(list)  # by version
    for model in models:
        names[model.version_id].append(model.name)
    demand = {each.model: each for each in cluster.demand}
    own_demand = [demand[model.name] for model in models if model.name in demand]
    figures = {
        "at_unix_s": sample.at_unix_s,
        "is_admin": caller.is_admin,
        "tenant": caller.tenant,
        "requests_per_s": sum(num for num, _ in sums) / RATES_OVER_S,
        "tokens_per_s": sum(num for _, num in sums) / RATES_OVER_S,
        "ttft_p50_s": _quantile(ttfts, 0.5),
        "ttft_p95_s": _quantile(ttfts, 0.95),
        "num_awake": sum(model.version_id in ready for model in models),
        "num_models": len(models),
        "num_running": sum(each.num_running for each in own_demand),
        "num_waiting": sum(each.num_waiting for each in own_demand),
        "alerts": list(_alerts(caller, sample.alerts, {model.name for model in models})),
        "demand": {each.model: [each.num_running, each.num_waiting] for each in own_demand},
        "instances": list(_instances(caller, cluster, names)),
        "relays": list(_relays(caller, cluster, names)),
    }
    return figures | ({"hosts": _hosts(cluster, names)} if caller.is_admin else {})


def _alerts(caller: Principal, alerts: Iterable[Alert], own: Set[str]) -> Iterator[dict[str, Any]]:
    """Tenants see what concerns their models or the whole platform, without the names of workers and hosts."""
    for alert in alerts:
        models = [name for name in alert.models if caller.is_admin or name in own]
        text = alert.text if caller.is_admin else alert.public
        if text and (models or not alert.models):
            advice = alert.advice if caller.is_admin else ""
            yield {"text": text, "advice": advice, "models": models, "is_critical": alert.is_critical}


def _instances(
    caller: Principal, cluster: scheduler_pb2.ClusterView, names: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    workers = {worker.slot.instance_id: worker for worker in cluster.workers}
    for instance in cluster.instances:
        if instance.version_id not in names:
            continue
        slot = workers.get(instance.instance_id, reports_pb2.WorkerReport()).slot
        shown = {
            "id": instance.instance_id,
            "models": names[instance.version_id],
            "state": instance.state,
            "roles": _roles(instance.roles),
            "in_state_s": instance.in_state_s,
            "loaded": round(slot.loaded_share, 3),
            "num_layers_ready": slot.num_layers_ready,
            "num_layers": slot.num_layers,
            "phases": [[each.name, each.begin_unix_us, each.end_unix_us] for each in slot.load_phases],
        }
        if caller.is_admin:
            shown |= {
                "worker": instance.worker_id,
                "num_running": instance.num_running,
                "idle_s": instance.idle_s,
                "roles_reason": instance.roles_reason,
                "moves": [[each.worker_id, each.num_prompts, each.saved_s] for each in instance.moves],
            }
        yield shown


def _relays(
    caller: Principal, cluster: scheduler_pb2.ClusterView, names: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    versions = {each.pack_id: each.version_id for each in cluster.versions}
    for relay in cluster.relays:
        own = names.get(versions.get(relay.pack_id, ""), [])
        if not own and not caller.is_admin:
            continue
        yield {
            "models": own or [relay.model],
            "state": scheduler_pb2.RelayView.State.Name(relay.state).removeprefix("STATE_").lower(),
            "verified": relay.num_chunks_verified / max(relay.num_chunks, 1),
            "pack_bytes": relay.pack_bytes,
            "bytes_per_s": relay.bytes_per_s,
            "left_s": relay.left_s,
            "ended_s": relay.ended_s,
            "pack": relay.pack_id if caller.is_admin else "",
            "target": relay.target if caller.is_admin else "",
            "sources": [each.holder_id for each in relay.sources] if caller.is_admin else [],
            "reason": relay.reason if caller.is_admin else "",
        }


def _hosts(cluster: scheduler_pb2.ClusterView, names: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    packs = {each.pack_id: names.get(each.version_id) or list(each.models) for each in cluster.versions}
    slots: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for worker in cluster.workers:
        slots[worker.host_id].append(_slot(worker, names, cluster.slot_bytes.get(worker.worker_id, 0)))
    hosts = {store.host_id: _host(store, packs) for store in cluster.stores}
    unknown = {host_id: {"id": host_id} for host_id in slots.keys() - hosts.keys()}  # their stores do not report
    return [host | {"slots": slots[host_id]} for host_id, host in sorted((hosts | unknown).items())]


def _host(store: reports_pb2.StoreReport, packs: Mapping[str, list[str]]) -> dict[str, Any]:
    def models_of(pack_id: str) -> list[str]:
        return packs.get(pack_id) or [pack_id[:12]]

    return {
        "id": store.host_id,
        "failure_domain": store.failure_domain,
        "arena_bytes": store.arena_bytes,
        "arena_free_bytes": store.arena_free_bytes,
        "memory": [
            {
                "models": models_of(copy.pack_id),
                "verified": copy.num_chunks_verified / max(copy.num_chunks, 1),
                "pack_bytes": copy.pack_bytes,
                "num_pins": copy.num_pins,
            }
            for copy in store.copies
        ],
        "disk": sorted(name for pack_id in store.disk.pack_ids for name in models_of(pack_id)),
    }


def _slot(worker: reports_pb2.WorkerReport, names: Mapping[str, list[str]], size_bytes: int) -> dict[str, Any]:
    state = reports_pb2.SlotState.State.Name(worker.slot.state).removeprefix("STATE_").lower()
    return {
        "worker": worker.worker_id,
        "device": worker.device_name or worker.device,
        "size_bytes": size_bytes,
        "labels": list(worker.labels),
        "state": "leaving" if worker.is_leaving else state,
        "instance": worker.slot.instance_id,
        "models": names.get(worker.slot.version_id) or [*filter(None, [worker.slot.model])],
        "roles": _roles(worker.slot.roles or worker.roles),
        "loaded": round(worker.slot.loaded_share, 3),
        "num_running": worker.num_running,
        "kv_used": 1 - worker.kv_free_bytes / worker.kv_pool_bytes if worker.kv_pool_bytes else 0.0,
        "error": worker.slot.error,
        "bottleneck": worker.profile.bottleneck,
        "advice": ADVICE.get(worker.profile.bottleneck, ""),
    }


def _roles(roles: Iterable[types_pb2.Role.ValueType]) -> list[str]:
    return [types_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in roles]


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
