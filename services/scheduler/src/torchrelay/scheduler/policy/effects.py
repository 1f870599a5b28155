"""Effects that the policy asks for: commands to workers and stores, answers to gateways, and events to record."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from torchrelay.scheduler.policy.core import AttemptKey, Model, Placement, Roles, ServiceClass


@dataclass(frozen=True)
class LoadOrder:
    instance_id: str
    worker_id: str
    roles: Roles


@dataclass(frozen=True)
class Hop:
    """Host of a wake: its store gets the pack from ``sources`` (best first), then its workers load it."""

    store_id: str
    sources: tuple[str, ...]
    loads: tuple[LoadOrder, ...]
    num_striped: int = 1  # of the sources, followed at once
    urgent: bool = True  # of a wake; False: it takes only what others leave of the links


@dataclass(frozen=True)
class WakeCommand:
    """Hops are relayed in order; each host's loads start right after its own relay."""

    model: Model
    hops: tuple[Hop, ...]
    traceparent: str = ""  # of the request that woke it


@dataclass(frozen=True)
class RerouteCommand:
    """Gives a running relay other sources; it keeps what it has received."""

    model: Model
    hop: Hop  # without loads
    urgent: bool


@dataclass(frozen=True)
class SetRolesCommand:
    instance_id: str
    worker_id: str
    roles: Roles


@dataclass(frozen=True)
class UnloadCommand:
    instance_id: str
    worker_id: str
    drain_s: float


@dataclass(frozen=True)
class CopyCommand:
    """Makes a copy that no request waits for; with ``keep_retained``, without evicting a retained one."""

    model: Model
    hop: Hop  # without loads
    urgent: bool
    keep_retained: bool


@dataclass(frozen=True)
class RetainCommand:
    """A store keeps these packs for the lease, in RAM and on disk, and evicts the first ones first if it must."""

    store_id: str
    pack_ids: tuple[str, ...]
    lease_s: float
    disk_pack_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class DisconnectCommand:
    """The peer at this address hangs: what waits for its answer ends now."""

    address: str


Command = (
    WakeCommand | RerouteCommand | SetRolesCommand | UnloadCommand | CopyCommand | RetainCommand | DisconnectCommand
)


class RefusalReason(enum.IntEnum):
    """The numbers are the protocol's."""

    QUEUE_FULL = 1
    NO_CAPACITY = 2
    LOAD_FAILED = 3
    NOT_MIGRATED = 5


class Placed(msgspec.Struct, frozen=True, gc=False):
    gateway_id: str
    placement: Placement


@dataclass(frozen=True)
class AdmissionRefused:
    gateway_id: str
    key: AttemptKey
    reason: RefusalReason
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Recall:
    """The attempt is to be asked for anew, if it has not begun."""

    gateway_id: str
    key: AttemptKey


@dataclass(frozen=True)
class Migrate:
    """Another attempt is to be asked for, which goes on with this one."""

    gateway_id: str
    key: AttemptKey


Answer = Placed | AdmissionRefused | Recall | Migrate


@dataclass(frozen=True)
class SchedulerEvent:
    """A decision or a transition, shown by Explain; also published to the history if it has a ``topic``."""

    at: float
    kind: str  # "wake", "place", "drain", "set_roles", "ready", ...
    model: str
    subject: str  # instance or model
    reason: str
    topic: str = ""  # "instance.ready", "scale.up", ...
    fields: Mapping[str, str | int | float] = field(default_factory=dict)
    bytes_by_source: Mapping[str, int] = field(default_factory=dict)  # of a relay that has ended
    aliases: tuple[str, ...] = ()  # the models it concerns, if several share the version
    by_tenant: Mapping[str, str] = field(default_factory=dict)  # the reason as each tenant may know it; see Reason


class AttemptPlaced(msgspec.Struct, frozen=True, gc=False):
    """A request was placed: times for its timeline."""

    key: AttemptKey
    model: str
    admitted_at: float
    placed_at: float
    placement: Placement
    traceparent: str = ""
    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_target_s: float = 0.0  # from ``admitted_at`` on; 0: it has had its first token
    tbt_target_s: float = 0.0


@dataclass(slots=True)
class Effects:
    """Everything that one input caused, in order."""

    commands: list[Command] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    events: list[SchedulerEvent] = field(default_factory=list)
    opened: list[AttemptPlaced] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.commands or self.answers or self.events or self.opened)
