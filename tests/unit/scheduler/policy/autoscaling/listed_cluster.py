"""A cluster given as lists: slots, workers, stores and demands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tests.unit.scheduler.policy.paper_cluster import a_model, an_admission
from torchrelay.scheduler.policy.autoscaling.actions import FIRST_SLOT
from torchrelay.scheduler.policy.autoscaling.least_losses import LeastLosses
from torchrelay.scheduler.policy.autoscaling.view import VersionUse, View
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.instances import Instances
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempt, OpenAttempts
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.demand.demand import DecodeDemand, Demand
from torchrelay.scheduler.policy.types import (
    AttemptKey,
    Model,
    Placement,
    SlotStatus,
    StoreStatus,
    WorkerRef,
    WorkerStatus,
)

RULES = PolicyConfig()


class Slot(NamedTuple):
    """An instance with its attempts and the use of its version, which all its slots have."""

    instance: Instance
    num_open: int = 0
    last_active: float = 0.0
    reload_s: float = 0.0
    tenants: frozenset[str] = frozenset()
    arrivals_per_s: float = 0.0
    target_s: float = 2.0


def a_demand(model: Model, num_waiting: int = 1, **changes: object) -> Demand:
    return replace(Demand(model, num_waiting, 0, 0.0), **changes)  # type: ignore[arg-type]


def a_view(
    demands: Sequence[Demand],
    slots: Sequence[Slot] = (),
    workers: Iterable[WorkerStatus] = (),
    stores: Iterable[StoreStatus] = (),
    now: float = 100.0,
    known: Sequence[Demand] = (),
    keep_s: float = 60.0,
    **changes: Any,
) -> View:
    """A view of these slots and peers; a drain takes no time. ``known``: demands of models that are not decided on."""
    instances, membership, losses = Instances(OpenAttempts()), Membership(fence_s=0.0), LeastLosses(away_s=0.0)
    uses: dict[str, VersionUse] = {}
    num_slots_of: Counter[str] = Counter()
    for slot in slots:
        instance = replace(slot.instance, last_active=slot.last_active)
        instances.put(instance)
        key, ref = AttemptKey("", 1), WorkerRef("", "", "")
        attempt = OpenAttempt(an_admission(a_model(), "r"), Placement(key, ref, ref, False), 0.0, 0)
        instance.work.decodes.update({AttemptKey(str(number), 1): attempt for number in range(slot.num_open)})
        uses[instance.version_id] = VersionUse(slot.tenants, slot.reload_s, slot.arrivals_per_s, slot.target_s)
        if instance.reason.cause != FIRST_SLOT:
            num_slots_of.update(slot.tenants)
        losses.changed(instance.version_id, has_instances=True)  # unknown, so that each exact loss is computed
    for worker in workers:
        if (seated := instances.on_worker(worker.worker_id)) is not None:
            worker = replace(worker, slot=SlotStatus(seated.phase))
        membership.accept_worker(worker, streamed=True)
    for store in stores:
        membership.accept_store(store)
    by_version = {demand.model.version_id: demand for demand in (*demands, *known)} if known else {}
    view = View(
        now=now,
        config=RULES,
        demands=demands,
        instances=instances,
        membership=membership,
        least_losses=losses,
        num_slots_of=num_slots_of,
        keep_s=lambda version_id: keep_s,
        use_of=lambda version_id: uses[version_id],
        demand_of=by_version.get,
        drain_s=lambda instance: 0.0,
        waited_for=frozenset(demand.model.version_id for demand in demands if demand.num_waiting),
    )
    return replace(view, **changes)


def crowded_demand(model: Model, num_waiting: int = 40, **changes: object) -> Demand:
    """5 requests a second of 0.1 s each, and 0.5 s to wait for them."""
    crowd = a_demand(model, num_waiting, arrivals_per_s=5.0, load=0.5, target_s=0.6, backlog_s=num_waiting / 10)
    return replace(crowd, **changes)  # type: ignore[arg-type]


def answers(num_answers: int, arrivals_per_s: float, **changes: object) -> DecodeDemand:
    """An instance holds 10 answers of 10 s each: one of them is one second of its work."""
    demand = DecodeDemand(
        num_answers, num_held=10, num_most=20, answer_s=10.0, arrivals_per_s=arrivals_per_s, target_s=2.0, late_s=60.0
    )
    return replace(demand, **changes)  # type: ignore[arg-type]
