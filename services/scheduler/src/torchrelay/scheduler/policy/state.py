"""The whole state of the scheduler, with the policy as its only owner, and small queries that several steps share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.autoscaling.actions import FIRST_SLOT
from torchrelay.scheduler.policy.autoscaling.least_losses import LeastLosses
from torchrelay.scheduler.policy.autoscaling.load_failures import AvoidedWorkers, LoadProgress
from torchrelay.scheduler.policy.autoscaling.minimums import Minimums
from torchrelay.scheduler.policy.autoscaling.version_rotation import VersionTurns
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.instances import Instances
from torchrelay.scheduler.policy.cluster.membership import Membership
from torchrelay.scheduler.policy.cluster.open_attempts import OpenAttempts
from torchrelay.scheduler.policy.cluster.slot_starts import SlotStarts
from torchrelay.scheduler.policy.cluster.tenant_slots import TenantSlots, VersionSlots
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.cluster.version_endpoints import VersionEndpoints
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.demand.lateness import load_cost
from torchrelay.scheduler.policy.demand.stalls import Stalls
from torchrelay.scheduler.policy.demand.usage import Usage
from torchrelay.scheduler.policy.effects import Effects, SchedulerEvent
from torchrelay.scheduler.policy.estimates.kv_transfer_time import KvTransferTimes
from torchrelay.scheduler.policy.estimates.latency import LatencyModels
from torchrelay.scheduler.policy.estimates.load_times import LoadTimes
from torchrelay.scheduler.policy.estimates.prefix_index import PrefixIndex
from torchrelay.scheduler.policy.queue.due_times import DueTimes
from torchrelay.scheduler.policy.queue.gateway_sessions import GatewaySessions
from torchrelay.scheduler.policy.queue.model_queue import ModelQueues
from torchrelay.scheduler.policy.reasons import Reason
from torchrelay.scheduler.policy.relay.links import Links
from torchrelay.scheduler.policy.relay.transfers import Transfers
from torchrelay.scheduler.policy.replication.copies import Copies
from torchrelay.scheduler.policy.replication.retention import Retention
from torchrelay.scheduler.policy.replication.worth import PackWorth, pack_worth
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import (
    MAX_VERSIONS,
    Admission,
    AttemptKey,
    InstancePhase,
    Model,
    Pool,
    PoolTarget,
)
from torchrelay.scheduler.policy.versions import Version, Versions

_MAX_REQUESTS_WITHOUT_TOKEN = 4096
_MAX_RECALLED = 4096


@dataclass
class State:
    """State of the policy, changed only by the policy's steps."""

    config: PolicyConfig
    new_id: Callable[[], str]  # a fresh instance id
    started_at: float
    queues: ModelQueues
    avoided_workers: AvoidedWorkers
    load_progress: LoadProgress
    gateways: GatewaySessions
    membership: Membership
    scale_turns: VersionTurns  # of models without a change
    least_losses: LeastLosses
    strategies: Strategies = field(default_factory=Strategies)
    idle_deadlines: DueTimes = field(default_factory=DueTimes)  # when versions may have been idle for their timeouts
    versions: Versions = field(init=False)
    load_times: LoadTimes = field(default_factory=LoadTimes)
    attempts: OpenAttempts = field(init=False)
    instances: Instances = field(init=False)
    due: DueTimes = field(default_factory=DueTimes)  # by version: when a waiting prompt may be dispatched
    stalls: Stalls = field(default_factory=Stalls)
    links: Links = field(default_factory=Links)
    latency_models: LatencyModels = field(default_factory=LatencyModels)
    kv_transfer_times: KvTransferTimes = field(default_factory=KvTransferTimes)
    prefix_index: PrefixIndex = field(default_factory=PrefixIndex)
    transfers: Transfers = field(init=False)
    copies: Copies = field(init=False)
    retention: Retention = field(init=False)
    version_of_pack: dict[str, str] = field(default_factory=dict)  # the version called last that has the pack
    minimums: Minimums = field(default_factory=Minimums)
    pool_targets: dict[Pool, PoolTarget] = field(default_factory=dict)
    pools_evaluated_at: float | None = None
    slot_starts: SlotStarts = field(default_factory=SlotStarts)  # of one device
    launcher_waits: str = ""  # why their workers do not run, as the launcher reports
    forecasts: dict[str, tuple[float, float]] = field(default_factory=dict)  # by unused version; see ``Demand``
    effects: Effects = field(default_factory=Effects)
    instances_without_token: Recent[str, tuple[str, ...]] = field(  # by request id; see note_no_token
        default_factory=lambda: Recent(_MAX_REQUESTS_WITHOUT_TOKEN)
    )
    recalled: Recent[str, Admission] = field(default_factory=lambda: Recent(_MAX_RECALLED))  # until they ask again
    overdue_slots_at: dict[str, float] = field(default_factory=dict)  # by tenant, of the last turn; see ``Drain``
    marked: set[str] = field(default_factory=set)  # versions to decide on by the next tick
    are_starving_marked: bool = False  # the same of all that wait without an instance
    marked_at: float = math.inf
    turn_due: float = field(init=False)
    round_due: float = field(init=False)
    whole_round_due: float = 0.0  # next round that evaluates minimums, refusals and pools
    tenant_slots: TenantSlots = field(init=False)
    advised_at: Recent[tuple[str, str], float] = field(
        default_factory=lambda: Recent(MAX_VERSIONS)
    )  # by subject and cause
    unserved_since: float | None = None  # since when no model can be loaded; None: models can be loaded
    without_slot_since: dict[AttemptKey, float] = field(default_factory=dict)  # of requests; see ``reserved_slots``

    @classmethod
    def fresh(cls, config: PolicyConfig, new_id: Callable[[], str], now: float, strategies: Strategies) -> State:
        queues = ModelQueues(config.queue_limit, config.queue_limit_total)
        gateways, membership = GatewaySessions(config.gateway_grace_s), Membership(config.fence_s)
        avoided, progress = AvoidedWorkers(config), LoadProgress(config)
        turns, losses = VersionTurns(config.whole_scale_every_s), LeastLosses(config.time_slice_s)
        return cls(config, new_id, now, queues, avoided, progress, gateways, membership, turns, losses, strategies)

    def __post_init__(self) -> None:
        self.turn_due = self.round_due = self.started_at
        self.attempts = OpenAttempts(on_change=self._work_changed)
        self.instances = Instances(self.attempts, on_change=self._instances_changed)
        self.transfers = Transfers(self.membership)
        self.copies = Copies(self.config, self.membership, self.pack_worth)
        self.retention = Retention(self.config, self.membership, self.copies)
        self.tenant_slots = TenantSlots(self._slots_of)
        self.versions = Versions(self._is_used, on_forget=self._forgotten)

    def _slots_of(self, version_id: str) -> VersionSlots:
        """The version's slots, without those that were taken from its tenants for a tenant without a slot."""
        instances = self.instances.of_version(version_id)
        number = sum(instance.reason.cause != FIRST_SLOT for instance in instances)
        return VersionSlots(self.tenants_of(version_id), number)

    def names_of(self, version_id: str) -> tuple[str, ...]:
        """The models of a version; empty before the first request and when all are deleted."""
        version = self.versions.get(version_id)
        return () if version is None else version.aliases.names

    def tenants_of(self, version_id: str) -> frozenset[str]:
        """The tenants of a version, by its instances if it was never called."""
        names = self.names_of(version_id) or [each.model for each in self.instances.of_version(version_id)]
        return frozenset(map(tenant_of, names))

    def _instances_changed(self, version_id: str, is_progress: bool) -> None:
        if is_progress:
            self.unblock(version_id)
            self.loads_changed(version_id)
            return
        self.tenant_slots.changed(version_id)
        self.forget_endpoints(version_id)
        self.least_losses.changed(version_id, has_instances=len(self.instances.of_version(version_id)) > 0)

    def _work_changed(self, instance_id: str) -> None:
        instance = self.instances.get(instance_id)
        endpoints = self.endpoints_of(instance.version_id) if instance is not None else None
        if instance is not None and endpoints is not None and endpoints.index is not None:
            endpoints.index.change(instance)

    def endpoints_of(self, version_id: str) -> VersionEndpoints | None:
        """The endpoints of a version as they were built last; None if they are to be built."""
        version = self.versions.get(version_id)
        return None if version is None else version.endpoints

    def forget_endpoints(self, version_id: str) -> None:
        """Lets the endpoints of a version be built again."""
        if (version := self.versions.get(version_id)) is not None:
            version.endpoints = None

    def loads_changed(self, version_id: str) -> None:
        """Lets the times of the version's loads be predicted again."""
        if (endpoints := self.endpoints_of(version_id)) is not None:
            endpoints.has_old_loads = True

    def unblock(self, version_id: str) -> None:
        """Records that the version's instances may take prompts again."""
        if (endpoints := self.endpoints_of(version_id)) is not None:
            endpoints.blocked_until = -math.inf

    @property
    def placing_due(self) -> float:
        """When a waiting request may be placed, or a marked model be evaluated, without another input."""
        return min(self.due.earliest, self.marked_at)

    def take_effects(self) -> Effects:
        effects, self.effects = self.effects, Effects()
        return effects

    def note_model(self, model: Model, now: float, *, is_new_call: bool = True) -> None:
        """Stores the newest settings of a version. ``is_new_call``: see ``VersionAliases.note``."""
        version = self.versions.called(model.version_id)
        aliases = version.aliases
        timeout_s = model.idle_timeout_s or self.config.idle_timeout_s
        tbt_target_s = model.targets.tbt_target_s or self.config.tbt_target_s
        caps = aliases.caps_of(model.name)
        if aliases.note(model, timeout_s, tbt_target_s, now, is_new_call=is_new_call):
            self.tenant_slots.changed(model.version_id)
        if model.caps != caps:
            version.too_large_for, version.has_new_caps = None, True  # a share may be large enough now, or too small
            self.unblock(model.version_id)
        max_instances, slots = aliases.max_instances(now, self.config.max_instances), aliases.slot_class(now)
        threads = aliases.threads(now)
        if (model.max_instances, model.slot_class, model.threads) != (max_instances, slots, threads):
            model = replace(model, max_instances=max_instances, num_devices=slots.num_devices, engine=slots.engine)
            model = replace(model, hosts=slots.labels, threads=threads)
        version.model = model
        self.version_of_pack[model.pack_id] = model.version_id

    def _forgotten(self, version: Version) -> None:
        self.tenant_slots.changed(version.version_id)
        if version.model is not None and self.version_of_pack.get(version.model.pack_id) == version.version_id:
            del self.version_of_pack[version.model.pack_id]

    def _is_used(self, version_id: str) -> bool:
        if version_id in self.minimums.models:
            return True
        return self.queues.num_waiting(version_id) > 0 or len(self.instances.of_version(version_id)) > 0

    def known_model(self, version_id: str) -> Model:
        """The settings in force of a version that was called."""
        model = self.versions.model(version_id)
        assert model is not None, "a request names its model"
        return model

    def expected_load_s(self, model: Model) -> float:
        """Expected time of a load of the model on any host, from an empty slot to all layers ready."""
        return self.load_times.by_tier(model, self.config)[
            self.membership.nearest_tier(model.pack_id, model.num_devices)
        ]

    def keep_s(self, version_id: str, now: float) -> float:
        """How long to keep the last instance of the version unused; 0 if all its models are deleted. The longest that
        any of its models asks for; for those that do not, as long as the next load costs.
        """
        version = self.versions.get(version_id)
        if version is None:
            return self.config.idle_timeout_s or self.config.late_cost_s
        if version.aliases.is_deleted:
            return 0.0
        own_s, is_computed = version.aliases.idle_timeout_s(now)
        return max(own_s, self._computed_keep_s(version, now)) if is_computed else own_s

    def _computed_keep_s(self, version: Version, now: float) -> float:
        if version.model is None:
            return self.config.idle_timeout_s or self.config.late_cost_s
        cold_s = self.cold_s(version.model, version.usage, now)
        return max(version.usage.gaps.keep_s(cold_s), self.config.time_slice_s)

    def late_s(self, model: Model) -> float:
        """Cost of a late request, in seconds of the model's slot."""
        return self.config.late_cost_s / model.num_devices

    def cold_s(self, model: Model, usage: Usage, now: float) -> float:
        """Cost of the next load of a model without an instance, in seconds of its slot."""
        load_s = self.load_times.by_tier(model, self.config)[Tier.HOST]
        return load_cost(load_s, usage.expected_per_s(now), self.ttft_target_s(usage), self.late_s(model))

    def pack_worth(self, model: Model, last_used: float, now: float) -> PackWorth:
        """Worth of a copy of the model's pack."""
        version = self.versions.get(model.version_id)
        usage = version.usage if version is not None else Usage()
        if usage.last_used is None:
            usage = Usage(last_used=last_used)
        rate_per_s, target_s, late_s = usage.expected_per_s(now), self.ttft_target_s(usage), self.late_s(model)
        load_costs = {
            tier: load_cost(load_s, rate_per_s, target_s, late_s)
            for tier, load_s in self.load_times.by_tier(model, self.config).items()
        }
        return pack_worth(model, load_costs, usage.next_use_s(now), self.membership.is_on_disk(model.pack_id))

    def ttft_target_s(self, usage: Usage) -> float:
        """Recent mean target for the first token."""
        return usage.target_s or self.config.standard_ttft_s

    def tbt_target_s(self, version_id: str, now: float) -> float:
        """Target for the time between tokens of the version's answers: the shortest target of its models."""
        version = self.versions.get(version_id)
        return (version.aliases.tbt_target_s(now) if version is not None else None) or self.config.tbt_target_s

    def model_of_pack(self, pack_id: str, pack_bytes: int = 0) -> Model:
        """The model of a pack, named by the start of the pack's id until an admission names it."""
        model = self.versions.model(self.version_of_pack.get(pack_id, ""))
        if model is not None:
            return model
        if (pack := self.copies.packs.get(pack_id)) is not None:
            return pack.model
        name = next((instance.model for instance in self.instances if instance.pack_id == pack_id), pack_id[:12])
        return Model(name, "", pack_id, pack_bytes, 0)

    def does_not_return(self, request_id: str, instance_id: str) -> None:
        """Forgets a recalled prompt that is placed again, or ended."""
        if (instance := self.instances.get(instance_id)) is not None:
            instance.returning.pop(request_id, None)

    def note_no_token(self, request_id: str, instance_ids: tuple[str, ...]) -> None:
        """Records an attempt that ended without a token. If the request comes again, these instances become suspect."""
        self.instances_without_token[request_id] = instance_ids

    def record_event(
        self,
        now: float,
        kind: str,
        subject: Instance | Model,
        reason: Reason | str,
        event: str = "",
        fields: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Records a decision or transition for Explain; also for the event history if ``event`` gives its subject."""
        model, name = (
            (subject.name, subject.name) if isinstance(subject, Model) else (subject.model, subject.instance_id)
        )
        why = reason if isinstance(reason, Reason) else Reason("", reason)
        named = self.names_of(subject.version_id)
        if isinstance(subject, Instance) and subject.phase is InstancePhase.DRAINING:
            named = tuple(name for name in named if name in subject.names_at_drain)
        figures = {**(fields or {}), **why.fields}
        self.effects.events.append(
            SchedulerEvent(now, kind, model, name, why.text, event, figures, {}, named, why.by_tenant)
        )
