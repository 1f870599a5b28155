"""The view that the autoscaler decides on, made from the state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from torchrelay.scheduler.policy.autoscaling.slot_worth import WorthLine, slot_worth
from torchrelay.scheduler.policy.autoscaling.view import VersionUse, View
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.demand.usage import Usage
from torchrelay.scheduler.policy.handlers import demands
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.storage_tiers import Tier


def view_of(state: State, now: float, version_ids: Iterable[str] | None = None) -> View:
    """The view for a decision on the whole cluster or on these versions. Stores in the state what later decisions
    need.
    """
    is_complete = version_ids is None
    if version_ids is None:
        staying = {instance.version_id for instance in state.instances if instance.staying}
        version_ids = sorted(
            staying.union(state.queues.versions, state.minimums.in_force, expected_versions(state, now))
        )
    view = present_view(state, now, version_ids, is_complete=is_complete)
    for demand in view.demands:
        demands.note_demand(state, demand, now)
    return view


def present_view(state: State, now: float, version_ids: Iterable[str], *, is_complete: bool = False) -> View:
    """The same for these versions, without a note in the state."""
    version_ids = tuple(version_ids)
    is_settled = now - state.started_at >= state.config.settle_s

    @cache
    def demand_of(version_id: str) -> Demand | None:
        model = state.versions.model(version_id)
        return None if model is None else demands.demand_of(state, model, now)

    known = [demand for each in (version_ids if is_settled else ()) if (demand := demand_of(each)) is not None]
    return View(
        now=now,
        config=state.config,
        demands=known,
        instances=state.instances,
        membership=state.membership,
        least_losses=state.least_losses,
        num_slots_of=state.tenant_slots.numbers,
        keep_s=lambda version_id: state.keep_s(version_id, now),
        use_of=cache(lambda version_id: _use_of(state, version_id, now)),
        demand_of=demand_of,
        drain_s=lambda instance: _drain_s(state, instance),
        is_complete=is_complete,
        version_ids=version_ids,
        waited_for=frozenset(state.queues.versions) if is_settled else frozenset(),
        minimums=state.minimums.in_force,
        overdue_slots_at=state.overdue_slots_at,
    )


def _use_of(state: State, version_id: str, now: float) -> VersionUse:
    version = state.versions.get(version_id)
    model, usage = (None, Usage()) if version is None else (version.model, version.usage)
    return VersionUse(
        state.tenants_of(version_id),
        state.load_times.by_tier(model, state.config)[Tier.HOST] if model is not None else 0.0,
        usage.expected_per_s(now),
        state.ttft_target_s(usage),
    )


def _drain_s(state: State, instance: Instance) -> float:
    """The longest running answer is assumed to have twice the mean length left, if that is known."""
    work, worker = instance.work, state.membership.workers.get(instance.worker_id)
    if not work.num_choices or worker is None:
        return 0.0
    latency = state.latency_models.of(worker, instance.pack_id, state.config)
    version = state.versions.get(instance.version_id)
    num_tokens = (version.usage.answers.mean if version is not None else None) or 0.0
    return min(2 * num_tokens * latency.tbt_s(work.num_choices, work.num_attended), state.config.drain_s)


def newest_version(state: State, model: str) -> str:
    """The id of the newest version that has the name; empty if none has it."""
    versions = (each for each in reversed(state.versions) if each.model is not None)
    names = ((each.version_id, {*each.aliases.names, each.model.name}) for each in versions if each.model is not None)
    return next((version_id for version_id, of_version in names if model in of_version), "")


def worth_lines(state: State, model: str, now: float) -> list[WorthLine]:
    """The present worth of a slot to a model; empty if the model is unknown, or while reports arrive after a start."""
    if not (version_id := newest_version(state, model)):
        return []
    view = present_view(state, now, dict.fromkeys((version_id, *state.queues.versions)))
    demand = view.demand_of(version_id) if view.demands else None
    if demand is None:
        return []
    return slot_worth(replace(demand, model=replace(demand.model, name=model)), view)


def expected_versions(state: State, now: float) -> list[str]:
    """Versions whose next request is expected about now; deletes forecasts that have passed."""
    for version_id, (_, until) in list(state.forecasts.items()):
        if until < now:
            del state.forecasts[version_id]
    return [version_id for version_id, (begin, _) in state.forecasts.items() if begin <= now]
