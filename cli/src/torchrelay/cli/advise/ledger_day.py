"""A live platform as a day to simulate: the ledger's requests, and its cluster and models as they are now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from torchrelay.cli.errors import CliError
from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.types import InstancePhase, StoreStatus, WorkerStatus
from torchrelay.scheduler.service.converters import latency_from_proto, store_from_proto, worker_from_proto
from torchrelay.sim.advice.workload import Day, Measured, Workload, left_out
from torchrelay.sim.recorded_day import differences_of, equal_hosts
from torchrelay.sim.scenario import Fleet, Request, ServedModel

if TYPE_CHECKING:
    from torchrelay.cli.api.client import GatewayClient
    from torchrelay.control.v1.scheduler_pb2 import ClusterView

_PAGE, _MOST_REQUESTS = 500, 20_000
_KV_SHARE = 8e-6  # bytes of KV per token and byte of weights, as of an 8B model with grouped attention
_WIDE = ("BF16", "F16", "F32")  # dtypes of models that an upload quantizes
_ENDED = ("ok", "cancelled")  # other requests say nothing of how long they would have been


def read_ledger_day(client: GatewayClient, hours: float) -> Day:
    """Reads what the platform recorded in the last ``hours``. Raises ``CliError`` if that is nothing to simulate."""
    from torchrelay.cli.api.polling import look
    from torchrelay.control.v1.scheduler_pb2 import ClusterView

    now = datetime.now(UTC)
    rows, is_whole = _requests(client, now - timedelta(hours=hours))
    view = ClusterView.FromString(look(client, "/v1/cluster", "application/x-protobuf"))
    models = client.call("GET", "/v1/models")["data"]
    if is_whole or not rows:
        return ledger_day(rows, view, models, hours)
    day = ledger_day(rows, view, models, hours_since_oldest(rows, now))
    note = f"only the last {len(rows):,} requests of the {hours:g} hours were read"
    return replace(day, notes=(*day.notes, note))


def hours_since_oldest(rows: Collection[Mapping[str, Any]], now: datetime) -> float:
    """Hours in which the rows ended: /v1/requests lists them by their ends."""
    oldest_unix_us: int = min(row["ended_unix_us"] for row in rows)
    return (now.timestamp() - oldest_unix_us / 1e6) / 3600


def _requests(client: GatewayClient, begin: datetime) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """Rows of /v1/requests that have ended, the newest first, and whether they are all."""
    rows: list[Mapping[str, Any]] = []
    after: dict[str, str] = {}
    for _ in range(_MOST_REQUESTS // _PAGE):
        params = {"from": begin.isoformat(), "limit": _PAGE, **after}
        page = client.call("GET", "/v1/requests", params=params)
        rows += (row for row in page["data"] if row["status"] != "running")
        if not page["has_more"]:
            return rows, True
        last = page["data"][-1]
        after = {"after_id": last["id"], "after_status": last["status"]}
    return rows, False


def ledger_day(
    rows: Collection[Mapping[str, Any]], view: ClusterView, models: Iterable[Mapping[str, Any]], hours: float
) -> Day:
    """``rows``: of /v1/requests. ``models``: of /v1/models. Raises ``CliError`` if they are nothing to simulate."""
    if not rows:
        raise CliError(f"nothing to advise: no request ended in the last {hours:g} hours", "take more with --hours")
    workers = [worker_from_proto(worker, 0.0) for worker in view.workers]
    stores = [store_from_proto(store, 0.0) for store in view.stores]
    settings = {model["id"]: model for model in models if "alias_of" not in model}
    pack_of = {name: version.pack_id for version in view.versions for name in version.models}
    latencies = {
        version.pack_id: latency_from_proto(version.latency)
        for version in view.versions
        if version.latency.prefill.num_steps and version.latency.decode.num_steps
    }
    called = sorted({row["model"] for row in rows} & settings.keys())
    in_force = {each.model: each.num_instances for each in view.minimums}
    minimums = {name: max(settings[name]["min_instances"], in_force.get(name, 0)) for name in called}
    served = {
        name: replace(
            _served(settings[name], latencies[pack_of[name]], _slot_of(pack_of[name], workers)),
            min_instances=minimums[name],
        )
        for name in called
        if workers and pack_of.get(name) in latencies
    }
    kept = sorted(
        (row for row in rows if row["model"] in served and row["status"] in _ENDED),
        key=lambda row: (row["opened_unix_us"], row["id"]),
    )
    if not kept:
        hint = "call them, and advise again; or record a log for --replay"
        raise CliError(f"no worker has learned how long the steps of {', '.join(called) or 'a model'} take", hint)
    begin_us, packs = kept[0]["opened_unix_us"], {name: pack_of[name] for name in served}
    requests = [_request(row, begin_us) for row in kept]
    durations = {
        row["id"]: (row["ended_unix_us"] - row["opened_unix_us"]) / 1e6 for row in kept if row["status"] == "ok"
    }
    config = PolicyConfig(idle_timeout_s=_default_idle_s(settings.values()))
    fleet = _fleet(workers, stores, list(served.values()), packs, config)
    quantized = frozenset(name for name in served if settings[name]["dtype"] not in _WIDE)
    workload = Workload(
        list(served.values()),
        fleet,
        requests,
        config,
        hours * 3600,
        quantized,
        scheduled=frozenset(name for name in served if minimums[name] > settings[name]["min_instances"]),
        knows_late_cost=False,
    )
    notes = [*left_out([name for name in called if name not in served]), "KV bytes per token are estimated"]
    return Day(workload, Measured(durations_s=durations), notes, differences_of(workers, stores, fleet))


def _slot_of(pack_id: str, workers: Sequence[WorkerStatus]) -> WorkerStatus:
    """The slot that has the pack, or any slot."""
    return next((worker for worker in workers if worker.slot.pack_id == pack_id), workers[0])


def _served(settings: Mapping[str, Any], latency: LatencyModel, worker: WorkerStatus) -> ServedModel:
    config, pack_bytes = PolicyConfig(), int(settings["size_bytes"])
    return ServedModel(
        settings["id"],
        worker.num_devices,
        pack_bytes,
        max(worker.slot.num_layers, 1),
        max(int(pack_bytes * _KV_SHARE), 256),
        latency,
        ttft_base_s=settings["standard_ttft_s"] or config.standard_ttft_s,
        prefill_tokens_per_s=1 / max(latency.prefill.per_position_s, 1e-9),
        tpot_target_s=settings["tbt_target_s"] or config.tbt_target_s,
        ttft_prompt_factor=0.0,
        idle_timeout_s=settings["idle_timeout_s"],
        max_instances=settings["max_instances"],
    )


def _request(row: Mapping[str, Any], begin_us: int) -> Request:
    """Several choices as a single choice of mean length."""
    num_tokens = row["completion_tokens"] / max(len(row["causes"]), 1)
    arrives_at = (row["opened_unix_us"] - begin_us) / 1e6
    return Request(row["id"], arrives_at, row["model"], max(row["prompt_tokens"], 1), max(round(num_tokens), 1))


def _default_idle_s(models: Iterable[Mapping[str, Any]]) -> float:
    """The scheduler's idle timeout; 0: computed."""
    defaults = [model["effective_idle_timeout_s"] or 0.0 for model in models if not model["idle_timeout_s"]]
    return Counter(defaults).most_common(1)[0][0] if defaults else 0.0


def _fleet(
    workers: Sequence[WorkerStatus],
    stores: Sequence[StoreStatus],
    models: Sequence[ServedModel],
    pack_of: Mapping[str, str],
    config: PolicyConfig,
) -> Fleet:
    """Rates are the greatest of the loads and copies that the reports still show, otherwise the scheduler's guesses."""
    bytes_of = {pack_of[model.name]: model.pack_bytes for model in models}
    copies = [copy for store in stores for copy in store.copies.values() if copy.relay_end_us > copy.relay_first_us > 0]
    remote = [
        copy.pack_bytes * 1e6 / (copy.relay_end_us - copy.relay_begin_us) for copy in copies if copy.source == "remote"
    ]
    loads = []
    for worker in workers:
        slot = worker.slot
        if slot.phase is InstancePhase.READY and slot.load_phases and slot.pack_id in bytes_of:
            took_us = max(phase.end_us for phase in slot.load_phases) - min(
                phase.begin_us for phase in slot.load_phases
            )
            loads.append(bytes_of[slot.pack_id] * 1e6 / max(took_us, 1) / worker.num_devices)
    return equal_hosts(
        workers,
        stores,
        max(models, key=lambda model: model.pack_bytes),
        nic_bytes_per_s=max((store.nic.bytes_per_s for store in stores if store.nic), default=0.0)
        or 10 * config.relay_bytes_per_s,
        device_bytes_per_s=max(loads, default=config.map_bytes_per_s),
        disk_bytes_per_s=max(remote, default=config.relay_bytes_per_s),
    )
