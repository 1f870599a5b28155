"""View of the cluster that a decision reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchrelay.scheduler.policy.autoscaling.least_losses import LeastLosses
from torchrelay.scheduler.policy.autoscaling.minimums import Minimum, reserved_instances
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.instances import Instances
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.demand.demand import Demand
from torchrelay.scheduler.policy.types import BOTH, DECODES, InstancePhase, Model, Role, Roles


class VersionUse(NamedTuple):
    """The use of a version, which all its instances share."""

    tenants: frozenset[str] = frozenset()  # of its models: identical uploads share instances
    reload_s: float = 0.0  # time to load it again after an eviction, from host memory
    arrivals_per_s: float = 0.0  # the greater of the recent rate and the long-run mean
    target_s: float = 2.0  # for the first token


@dataclass(frozen=True)
class View:
    """The cluster at the time of a decision, for these ``demands`` (of the models to decide on; all other models keep
    their slots, except for those that they can spare). Values of other versions are computed when asked for, as most
    decisions need few.
    """

    now: float
    config: PolicyConfig
    demands: Sequence[Demand]
    instances: Instances
    membership: Membership
    least_losses: LeastLosses  # the least that each version that has instances loses with a slot
    num_slots_of: Counter[str]  # by tenant, without the slots that were taken from it for a tenant without a slot
    keep_s: Callable[[str], float]  # how long to keep an unused slot of a version
    use_of: Callable[[str], VersionUse]
    demand_of: Callable[[str], Demand | None]  # of any version; None if it is unknown
    drain_s: Callable[[Instance], float]  # predicted time until the running answers of an instance end
    is_complete: bool = True  # the decision is about all instances, not only about those of the demands
    version_ids: Sequence[str] = ()  # versions to evaluate that may be unknown, and so have no demand
    waited_for: frozenset[str] = frozenset()  # versions that requests wait for
    minimums: Mapping[str, Minimum] = field(default_factory=dict)  # by version: minimums in force
    overdue_slots_at: Mapping[str, float] = field(default_factory=dict)  # by tenant: the last ``Drain.overdue_tenant``

    def is_busy(self, instance: Instance) -> bool:
        """Whether attempts are placed on the instance, or its worker counts requests. A worker may still count requests
        long after the last attempt, which belong to no gateway; to count them here would hold the slot for ever.
        """
        if not instance.work.is_idle:
            return True
        worker = self.membership.workers.get(instance.worker_id)
        is_counted = worker is not None and self.now - instance.last_active <= self.config.drain_s
        return worker is not None and is_counted and worker.num_running > 0

    def is_idle_since(self, instance: Instance, when: float) -> bool:
        """Whether the worker has accepted the instance and it was not used after ``when``."""
        return instance.accepted and instance.unused_since <= when and not self.is_busy(instance)

    def reload_s(self, instance: Instance) -> float:
        """Time to load the instance again: from host memory, where the weights stay, so no longer than its first
        load.
        """
        if instance.phase is not InstancePhase.READY:
            return 0.0
        return min(self.use_of(instance.version_id).reload_s, instance.since - instance.created_at)

    def of(self, model: Model) -> Sequence[Instance]:
        """The model's instances that are not draining."""
        return self.staying_of(model.version_id)

    def staying_of(self, version_id: str) -> Sequence[Instance]:
        staying = self._staying_known.get(version_id)
        if staying is None:
            instances = self.instances.of_version(version_id)
            staying = self._staying_known[version_id] = [each for each in instances if each.staying]
        return staying

    @cached_property
    def _staying_known(self) -> dict[str, Sequence[Instance]]:
        """Cache of ``staying_of``."""
        return {}

    @property
    def evaluated(self) -> Mapping[str, Sequence[Instance]]:
        """The instances that are not draining of all versions to decide on."""
        version_ids: Iterable[str] = dict.fromkeys(each.version_id for each in self.instances)
        if not self.is_complete:
            version_ids = dict.fromkeys((*(demand.model.version_id for demand in self.demands), *self.version_ids))
        staying = {version_id: self.staying_of(version_id) for version_id in version_ids}
        return {version_id: instances for version_id, instances in staying.items() if instances}

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Instances that stay without demand, for a minimum."""
        return reserved_instances(self.minimums, self.instances.of_version)

    @cached_property
    def idle(self) -> Sequence[Instance]:
        """Instances that no request uses or waits for, longest unused first."""
        idle = (
            instance
            for instance in self.instances
            if instance.work.is_idle  # of few instances in an overload
            and instance.placeable
            and not self.is_busy(instance)
            and instance.instance_id not in self.reserved
            and instance.version_id not in self.waited_for
        )
        return sorted(idle, key=lambda instance: (instance.last_active, instance.instance_id))

    @property
    def has_all_waiting(self) -> bool:
        """Whether ``demands`` contains every model that requests wait for."""
        return self.waited_for <= {demand.model.version_id for demand in self.demands}

    def missing(self, demand: Demand, kv_bytes: int) -> Roles:
        """Roles that no instance of the model plays, or will play, for a request with ``kv_bytes`` of KV."""
        played: set[Role] = set()
        for instance in self.of(demand.model):
            worker = self.membership.workers.get(instance.worker_id)
            is_small = worker is not None and worker.kv_pool_bytes < kv_bytes
            played |= instance.target_roles - DECODES if is_small else instance.target_roles
        return BOTH - played


def cover_both_roles(instances: Iterable[Instance]) -> bool:
    """Whether the instances together play both roles."""
    return frozenset(role for instance in instances for role in instance.target_roles) >= BOTH
