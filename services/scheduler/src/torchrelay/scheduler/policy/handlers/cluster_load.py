"""The autoscaler's input, built from the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import replace
from typing import NamedTuple

from torchrelay.scheduler.policy.autoscaling.autoscaler_input import (
    AutoscalerInput,
    ClusterLoad,
    Demand,
    InstanceLoad,
)
from torchrelay.scheduler.policy.autoscaling.least_losses import LeastLosses
from torchrelay.scheduler.policy.autoscaling.slot_worth import WorthLine, slot_worth
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.storage_tiers import Tier
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.handlers import demands
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import InstancePhase


def autoscaler_input(state: State, now: float, version_ids: Iterable[str] | None = None) -> AutoscalerInput:
    """Autoscaler input for the whole cluster or for these versions. Stores in the state what later decisions need."""
    if version_ids is None:
        staying = {instance.version_id for instance in state.instances if instance.staying}
        version_ids = sorted(
            staying.union(state.queues.versions, state.minimums.in_force, expected_versions(state, now))
        )
    made = present_input(state, now, version_ids)
    for demand in made.demands:
        demands.note_demand(state, demand, now)
    return made


def present_input(state: State, now: float, version_ids: Iterable[str]) -> AutoscalerInput:
    """The same for these versions, without a note in the state."""
    membership, settled = state.membership, now - state.started_at >= state.config.settle_s
    version_ids = list(version_ids)
    models = [state.models[version_id] for version_id in version_ids if version_id in state.models]
    settled_models = models if settled else ()
    by_version = {model.version_id: demands.demand_of(state, model, now) for model in settled_models}
    return AutoscalerInput(
        now=now,
        demands=tuple(by_version.values()),
        cluster_load=_StateLoad(state, by_version, now),
        workers=membership.workers,
        free_workers=membership.free_workers,
        stores=membership.stores_by_host,
        keep_s={version_id: state.keep_s(version_id, now) for version_id in version_ids},
        version_ids=version_ids,
        waited_for=frozenset(state.queues.versions) if settled else frozenset(),
        suspects=membership.suspects,
        minimums=state.minimums.in_force,
        holder_index=membership,
        overdue_slots_at=state.overdue_slots_at,
    )


def worth_lines(state: State, model: str, now: float) -> list[WorthLine]:
    """The present worth of a slot to a model; empty if the model is unknown, or while reports arrive after a start."""
    names = ((version_id, {*state.aliases.of(version_id), known.name}) for version_id, known in state.models.items())
    version_id = next((version_id for version_id, of_version in reversed(list(names)) if model in of_version), None)
    if version_id is None:
        return []
    made = present_input(state, now, dict.fromkeys((version_id, *state.queues.versions)))
    demand = made.cluster_load.demand_of(version_id) if made.demands else None
    if demand is None:
        return []
    return slot_worth(replace(demand, model=replace(demand.model, name=model)), made, state.config)


def expected_versions(state: State, now: float) -> list[str]:
    """Versions whose next request is expected about now; deletes forecasts that have passed."""
    for version_id, (_, until) in list(state.forecasts.items()):
        if until < now:
            del state.forecasts[version_id]
    return [version_id for version_id, (begin, _) in state.forecasts.items() if begin <= now]


class _StateLoad(ClusterLoad):
    """The load by the state. The loads and the demand of each version are computed once per decision."""

    def __init__(self, state: State, by_version: dict[str, Demand], now: float) -> None:
        self._state, self._now = state, now
        self._demands: dict[str, Demand | None] = dict(by_version)
        self._of_version: dict[str, tuple[InstanceLoad, ...]] = {}
        self._versions: dict[str, _Version] = {}

    @property
    def occupied_workers(self) -> Container[str]:
        return self._state.instances.workers

    def demand_of(self, version_id: str) -> Demand | None:
        if version_id not in self._demands:
            state, now, model = self._state, self._now, self._state.models.get(version_id)
            self._demands[version_id] = None if model is None else demands.demand_of(state, model, now)
        return self._demands[version_id]

    def of_version(self, version_id: str) -> tuple[InstanceLoad, ...]:
        loads = self._of_version.get(version_id)
        if loads is None:
            loads = self._of_version[version_id] = tuple(map(self._load, self._state.instances.of_version(version_id)))
        return loads

    def of_all(self) -> tuple[InstanceLoad, ...]:
        instances = self._state.instances
        by_id = {
            load.instance.instance_id: load for version_id in instances.versions for load in self.of_version(version_id)
        }
        return tuple(by_id[instance.instance_id] for instance in instances)

    @property
    def least_losses(self) -> LeastLosses:
        return self._state.least_losses

    def load(self, instance_id: str) -> InstanceLoad:
        instance = self._state.instances.get(instance_id)
        assert instance is not None, "a decision names instances that it was given"
        return self._load(instance)

    def on_host(self, host_id: str) -> tuple[Instance, ...]:
        return self._state.instances.on_host(host_id)

    def draining(self) -> tuple[Instance, ...]:
        return self._state.instances.draining

    def unused(self) -> list[Instance]:
        instances = self._state.instances
        unused = [each for each in instances if each.work.is_idle and not self._num_reported(each)]
        return sorted(unused, key=lambda instance: (instance.last_active, instance.instance_id))

    def _num_reported(self, instance: Instance) -> int:
        """Requests that the instance's worker counts. A worker may still count requests long after the last attempt,
        which belong to no gateway; to count them here would hold the slot for ever.
        """
        worker = self._state.membership.workers.get(instance.worker_id)
        is_counted = worker is not None and self._now - instance.last_active <= self._state.config.drain_s
        return worker.num_running if worker is not None and is_counted else 0

    def slots_by_tenant(self) -> Counter[str]:
        return self._state.tenant_slots.numbers

    def drain_s(self, instance: Instance) -> float:
        """The longest running answer is assumed to have twice the mean length left, if that is known."""
        state, worker = self._state, self._state.membership.workers.get(instance.worker_id)
        work = instance.work
        if not work.num_choices or worker is None:
            return 0.0
        latency = state.latency_models.of(worker, instance.pack_id, state.config)
        num_tokens = state.answer_lengths.mean(instance.version_id) or 0.0
        return min(2 * num_tokens * latency.tbt_s(work.num_choices, work.num_attended), state.config.drain_s)

    def _load(self, instance: Instance) -> InstanceLoad:
        state, now = self._state, self._now
        version = self._versions.get(instance.version_id)
        if version is None:
            version = self._versions[instance.version_id] = _version(state, instance.version_id, now)
        is_ready = instance.phase is InstancePhase.READY
        return InstanceLoad(
            instance,
            instance.work.num_open,
            self._num_reported(instance),
            instance.last_active,
            # A reload is from host memory, where the weights stay, so it takes no longer than the first load did.
            min(version.reload_s, instance.since - instance.created_at) if is_ready else 0.0,
            version.tenants or frozenset((tenant_of(instance.model),)),
            version.arrivals_per_s,
            version.target_s,
        )


class _Version(NamedTuple):
    """Values that all instances of a version share."""

    tenants: frozenset[str]
    reload_s: float
    arrivals_per_s: float
    target_s: float


def _version(state: State, version_id: str, now: float) -> _Version:
    model, usage = state.models.get(version_id), state.usages.of(version_id)
    return _Version(
        frozenset(map(tenant_of, state.aliases.of(version_id))),
        state.load_times.by_tier(model, state.config)[Tier.HOST] if model is not None else 0.0,
        usage.expected_per_s(now),
        state.ttft_target_s(usage),
    )
