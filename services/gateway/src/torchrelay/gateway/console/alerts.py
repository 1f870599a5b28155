"""Conditions that need an operator, from the figures of a moment, and what to do about each. Pure.

Prometheus watches the same and more with deploy/monitoring/rules.yaml, also while nobody looks at the console.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchrelay.common.health import SILENT, HealthReport
from torchrelay.common.quantities import format_bytes, format_count
from torchrelay.control.v1 import reports_pb2, scheduler_pb2
from torchrelay.gateway.console.core import Alert, Listed

WAIT_HOLD_S = 30.0
KV_HOLD_S = 60.0
REPORT_HOLD_S = 10.0  # longer than a service takes to start again
KV_FULL = 0.95
_ADVICE = {
    "database": "Requests are refused until it answers. Look whether it runs, and into the gateway's log.",
    "scheduler": "New requests wait, and models count as at zero. Look whether it runs, and into its log.",
    "param-store": "Uploads fail, and new models do not load. Look whether it runs, and into its log.",
    "nats": "Events of this time are missing; requests go on. Look whether it runs.",
    "redis": "Rate limits and budgets are not enforced; requests go on. Look whether it runs.",
}
_NAMES = {"nats": "NATS", "redis": "Redis"}
_TOLD_TO_TENANTS = ("database", "scheduler")


def alerts(
    models: Sequence[Listed], cluster: scheduler_pb2.ClusterView | None, health: HealthReport, disk_fault: str
) -> list[Alert]:
    """All conditions that hold, the critical ones first. ``disk_fault``: of the database; empty for none."""
    holding = [*_parts(cluster, health)]
    if disk_fault:
        advice = "Requests and uploads are refused. Free space there, or enlarge the disk."
        holding.append(Alert("disk", f"{disk_fault[:1].upper()}{disk_fault[1:]}.", advice, is_critical=True))
    if cluster is not None:
        holding += [*_workers(cluster), *_loads(models, cluster), *_overload(cluster)]
    return sorted(holding, key=lambda alert: not alert.is_critical)


def held(holding: Sequence[Alert], since: Mapping[str, float], now: float) -> list[Alert]:
    """The alerts that have held long enough. ``since``: when each began, by its key."""
    return [alert for alert in holding if now - since[alert.key] >= alert.hold_s]


def _parts(cluster: scheduler_pb2.ClusterView | None, health: HealthReport) -> Iterator[Alert]:
    faults = {**health.essential, **health.others}
    if cluster is None:
        faults.setdefault("scheduler", SILENT)
    for part, fault in faults.items():
        text = f"{_NAMES.get(part, f'The {part}')} {fault}."
        advice = _ADVICE.get(part, "Look whether it runs, and into its log.")
        public = text if part in _TOLD_TO_TENANTS else ""
        yield Alert(part, text, advice, is_critical=part not in ("nats", "redis"), public=public)


def _workers(cluster: scheduler_pb2.ClusterView) -> Iterator[Alert]:
    workers = [worker for worker in cluster.workers if not worker.is_leaving]
    if not workers:
        advice = "No model can load. Start one with `torchrelay join`, or look into the logs of those that ended."
        yield Alert("workers", "There is no worker.", advice, True, REPORT_HOLD_S, public="The platform has no worker.")
    for host_id in sorted({worker.host_id for worker in workers} - {store.host_id for store in cluster.stores}):
        advice = "Its workers load no model. Look whether it runs, and into its log."
        yield Alert(f"store {host_id}", f"The param-store of {host_id} does not report.", advice, True, REPORT_HOLD_S)


def _loads(models: Sequence[Listed], cluster: scheduler_pb2.ClusterView) -> Iterator[Alert]:
    for worker in cluster.workers:
        if worker.slot.error and worker.slot.state == reports_pb2.SlotState.STATE_FREE:
            advice = "It is tried again when it is needed; the worker's log has more."
            text = f"The last load on {worker.worker_id} failed: {worker.slot.error}"
            yield Alert(f"load {worker.worker_id}", text, advice, models=_served(worker))
    largest = cluster.largest_slot_bytes
    for model in models:
        if 0 < largest < model.pack_bytes:
            needed, offered = format_bytes(model.pack_bytes), format_bytes(largest)
            text = f"No slot can hold it: it has {needed}, the largest slot {offered}."
            advice = "Give workers more memory or more devices, or upload a smaller model."
            yield Alert(f"size {model.name}", text, advice, models=(model.name,), public=text)
    for relay in cluster.relays:
        if relay.state == scheduler_pb2.RelayView.STATE_FAILED:
            text = f"The relay to {relay.target} failed: {relay.error or relay.reason}"
            advice = "It is tried again when it is needed; events of the kind relay have earlier causes."
            yield Alert(f"relay {relay.target} {relay.pack_id}", text, advice, models=(relay.model,))


def _overload(cluster: scheduler_pb2.ClusterView) -> Iterator[Alert]:
    for demand in cluster.demand:
        if demand.num_waiting:
            text = f"Requests have waited all the time; {format_count(demand.num_waiting, 'request')} now."
            advice = "More workers would help, or a larger `max_instances`; the model's page shows why it has no more."
            yield Alert(f"wait {demand.model}", text, advice, False, WAIT_HOLD_S, (demand.model,), text)
    for worker in cluster.workers:
        used = 1 - worker.kv_free_bytes / worker.kv_pool_bytes if worker.kv_pool_bytes else 0.0
        if used > KV_FULL:
            text = f"The KV pool of {worker.worker_id} is {used:.0%} full, so its requests wait."
            advice = "More workers would help, or a larger KV pool."
            yield Alert(f"kv {worker.worker_id}", text, advice, hold_s=KV_HOLD_S, models=_served(worker))
    for pool in cluster.pools:
        if pool.num_wanted > pool.num_slots:
            slots = f"slots of {format_count(pool.num_devices, 'device')}"
            text = f"{pool.num_wanted} {slots} are wanted, {pool.num_slots} are there: {pool.reason}"
            yield Alert(f"pool {pool.num_devices}", text, "Start more workers.", hold_s=KV_HOLD_S)


def _served(worker: reports_pb2.WorkerReport) -> tuple[str, ...]:
    return tuple(filter(None, [worker.slot.model]))
