"""A recorded input log of a scheduler as a simulation: its models, cluster and requests, and what came of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.common.quantities import format_bytes
from torchrelay.scheduler.policy import inputs
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import Admission, Model, StoreStatus, WorkerStatus
from torchrelay.scheduler.service.input_log import Step, steps
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome, ServedModel
from torchrelay.sim.spent import Spent
from torchrelay.sim.summary import Summary, summarize

_ALIKE = 1.1  # most memory of a host, times the least, of hosts that are called alike


@dataclass(frozen=True)
class RecordedDay:
    """``measured``: what came of the requests on the recorded cluster. ``without_latency``: models that were left out
    with their requests, as no worker had learned how long their steps take. ``held``: times of arrivals, and the device
    seconds that instances had held until then. ``span_s``: from the first arrival to the log's end.
    ``differences``: of the hosts, that the fleet does not show.
    """

    models: Sequence[ServedModel]
    fleet: Fleet
    requests: Sequence[Request]
    config: PolicyConfig
    measured: Summary
    without_latency: Sequence[str]
    outcomes: Sequence[RequestOutcome]
    held: Sequence[tuple[float, float]]
    span_s: float
    differences: Sequence[str]


@dataclass
class _Seen:
    """A request's first admission, and what its attempts produced."""

    admission: Admission
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_output_tokens: int = 0


@dataclass
class _Day:
    """Collects what a log shows, from its first input to its last."""

    seen: dict[str, _Seen] = field(default_factory=dict)  # by request
    models: dict[str, Model] = field(default_factory=dict)  # by version, as first named
    latencies: dict[str, LatencyModel] = field(default_factory=dict)  # by pack, as last reported
    num_layers: dict[str, int] = field(default_factory=dict)  # by pack
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    instance_ids: set[str] = field(default_factory=set)
    held: list[tuple[float, float]] = field(default_factory=list)  # time and device seconds until then
    min_instances: dict[str, int] = field(default_factory=dict)  # by version, as last set
    at: float = 0.0

    def note(self, step: Step) -> None:
        self._note_spending(step)
        match step.input:
            case inputs.Admit(admission=admission, model=model):
                self.models.setdefault(model.version_id, model)
                self.seen.setdefault(admission.key.request_id, _Seen(admission))
                self.held.append((step.now, self.spent.device_s))
            case inputs.MinimumsSet(models=models):
                self.min_instances = {model.version_id: model.min_instances for model in models}
            case inputs.FirstToken(key=key) if seen := self.seen.get(key.request_id):
                seen.first_token_at = seen.first_token_at or step.now
            case inputs.Release(key=key, outcome=outcome) if seen := self.seen.get(key.request_id):
                if outcome is not None and outcome.num_output_tokens:
                    seen.first_token_at, seen.ended_at = seen.first_token_at or step.now, step.now
                    seen.num_output_tokens += outcome.num_output_tokens
            case inputs.Withdraw(key=key):
                self.seen.pop(key.request_id, None)  # its client left: nothing says what it would have been
            case inputs.WorkerReported(worker=worker):
                self.workers[worker.worker_id] = worker
                if worker.latency is not None and worker.latency.prefill.known and worker.latency.decode.known:
                    self.latencies[worker.slot.pack_id] = worker.latency
                if worker.slot.num_layers:
                    self.num_layers[worker.slot.pack_id] = worker.slot.num_layers

    def _note_spending(self, step: Step) -> None:
        """Counts devices and RAM from the input before until this one."""
        state, passed_s = step.policy.state, step.now - self.at if self.at else 0.0
        self.at = step.now
        instances = list(state.instances)
        workers = state.membership.workers
        held = sum(workers[each.worker_id].num_devices for each in instances if each.worker_id in workers)
        self.spent.device_s += passed_s * held
        stores = state.membership.stores_by_host.values()
        self.spent.ram_byte_s += passed_s * sum(
            copy.pack_bytes for store in stores for copy in store.copies.values() if copy.complete
        )
        self.instance_ids.update(instance.instance_id for instance in instances)


def read_recorded_day(path: Path) -> RecordedDay:
    """Applies the log's inputs once more. Requests with several choices count as a single choice of mean length, and a
    request that was never answered has the mean length of its model's answers.

    Raises ``ValueError`` that says what is missing or wrong.
    """
    day, step = _Day(), None
    try:
        for step in steps(path):
            day.note(step)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} is not a log of torchrelay-scheduler --record: {error}") from error
    if step is None or not day.seen:
        raise ValueError(f"{path} has no request")
    state = step.policy.state
    models = {
        version_id: replace(
            _served(model, day.latencies[model.pack_id], day.num_layers.get(model.pack_id, 1), state.config),
            min_instances=day.min_instances.get(version_id, 0),
        )
        for version_id, model in day.models.items()
        if model.pack_id in day.latencies
    }
    without = sorted(model.name for version_id, model in day.models.items() if version_id not in models)
    if not models:
        raise ValueError(f"{path}: no worker has learned how long the steps of {without[0]} take; record for longer")
    seen = [each for each in day.seen.values() if each.admission.version_id in models]
    begin, means = min(each.admission.admitted_at for each in seen), _mean_lengths(seen)
    requests = {
        each.admission.key.request_id: _request(each, models[each.admission.version_id], begin, means) for each in seen
    }
    outcomes = [_outcome(each, requests[each.admission.key.request_id]) for each in seen]
    day.spent.num_loads = len(day.instance_ids)
    measured = summarize(outcomes, {model.name: model for model in models.values()}, day.spent)
    ordered = sorted(requests.values(), key=lambda request: (request.arrives_at, request.request_id))
    fleet = _fleet(day, state, list(models.values()))
    held = [(at - begin, device_s) for at, device_s in day.held]
    differences = differences_of(list(day.workers.values()), list(state.membership.stores_by_host.values()), fleet)
    return RecordedDay(
        list(models.values()),
        fleet,
        ordered,
        state.config,
        measured,
        without,
        outcomes,
        held,
        day.at - begin,
        differences,
    )


def _served(model: Model, latency: LatencyModel, num_layers: int, config: PolicyConfig) -> ServedModel:
    return ServedModel(
        model.name,
        model.num_devices,
        model.pack_bytes,
        num_layers,
        model.kv_bytes_per_token,
        latency,
        ttft_base_s=model.targets.standard_ttft_s or config.standard_ttft_s,
        prefill_tokens_per_s=1 / max(latency.prefill.per_position_s, 1e-9),
        tpot_target_s=model.targets.tbt_target_s or config.tbt_target_s,
        ttft_prompt_factor=0.0,
        idle_timeout_s=model.idle_timeout_s,
        max_instances=model.max_instances,
    )


def _mean_lengths(seen: Sequence[_Seen]) -> Mapping[str, float]:
    """Mean tokens per answer, by version, of the requests that ended."""
    tokens, numbers = Counter[str](), Counter[str]()
    for each in seen:
        if each.num_output_tokens:
            tokens[each.admission.version_id] += each.num_output_tokens
            numbers[each.admission.version_id] += max(each.admission.num_choices, 1)
    return {version_id: tokens[version_id] / number for version_id, number in numbers.items()}


def _request(seen: _Seen, model: ServedModel, begin: float, means: Mapping[str, float]) -> Request:
    admission = seen.admission
    num_tokens = seen.num_output_tokens / max(admission.num_choices, 1)
    tenant = admission.tenant if admission.tenant != model.name.partition("/")[0] else ""
    return Request(
        admission.key.request_id,
        admission.admitted_at - begin,
        model.name,
        max(admission.num_prompt_tokens, 1),
        max(round(num_tokens or means.get(admission.version_id, 1.0)), 1),
        tenant,
        admission.service_class,
    )


def _outcome(seen: _Seen, request: Request) -> RequestOutcome:
    is_refused = not seen.first_token_at
    return RequestOutcome(
        request, seen.admission.admitted_at, seen.first_token_at, seen.ended_at, is_refused=is_refused
    )


def _fleet(day: _Day, state: State, models: Sequence[ServedModel]) -> Fleet:
    """The cluster with the rates at which packs loaded."""
    example = max(models, key=lambda model: model.pack_bytes)
    model = next(model for model in day.models.values() if model.name == example.name)
    load_s = state.load_times.by_tier(model, state.config)
    rate = {tier: model.pack_bytes / max(load_s[tier], 1e-6) for tier in Tier}
    return equal_hosts(
        list(day.workers.values()),
        list(state.membership.stores_by_host.values()),
        example,
        nic_bytes_per_s=state.links.usual_bytes_per_s,
        device_bytes_per_s=rate[Tier.HOST] / model.num_devices,
        disk_bytes_per_s=rate[Tier.REMOTE],
    )


def equal_hosts(
    workers: Sequence[WorkerStatus],
    stores: Sequence[StoreStatus],
    largest: ServedModel,
    *,
    nic_bytes_per_s: float,
    device_bytes_per_s: float,
    disk_bytes_per_s: float,
) -> Fleet:
    """A cluster of as many hosts as there were, each with the slots of most of them."""
    groups_of = _groups_by_host(workers)
    groups = Counter(groups_of.values()).most_common(1)[0][0]
    pool_bytes = max(worker.kv_pool_bytes / worker.num_devices for worker in workers)
    return Fleet(
        num_hosts=len(groups_of),
        groups=groups,
        nic_bytes_per_s=nic_bytes_per_s,
        device_bytes_per_s=device_bytes_per_s,
        disk_bytes_per_s=disk_bytes_per_s,
        arena_bytes=max((store.arena_target_bytes for store in stores), default=4 * largest.pack_bytes),
        device_memory_bytes=math.ceil((pool_bytes + largest.pack_bytes / largest.num_devices) / 0.9),
    )


def differences_of(workers: Sequence[WorkerStatus], stores: Sequence[StoreStatus], fleet: Fleet) -> list[str]:
    """Says what ``fleet``, of ``equal_hosts``, does not show of hosts that differ."""
    arenas = [store.arena_target_bytes for store in stores]
    if len(set(_groups_by_host(workers).values())) < 2 and max(arenas, default=0) <= _ALIKE * min(arenas, default=0):
        return []
    slots = " and ".join(map(str, fleet.groups))
    memory = format_bytes(fleet.arena_bytes)
    return [f"hosts differ: simulated as {fleet.num_hosts} hosts with slots of {slots} devices and {memory} of memory"]


def _groups_by_host(workers: Sequence[WorkerStatus]) -> Mapping[str, tuple[int, ...]]:
    """Devices of each slot, the largest first."""
    sizes: dict[str, list[int]] = {}
    for worker in workers:
        sizes.setdefault(worker.host_id, []).append(worker.num_devices)
    return {host_id: tuple(sorted(each, reverse=True)) for host_id, each in sizes.items()}
