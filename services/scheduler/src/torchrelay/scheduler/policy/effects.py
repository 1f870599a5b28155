"""Effects that the policy asks for: commands to workers and stores, answers to gateways, and events to record."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from torchrelay.scheduler.policy.types import AttemptKey, Model, Placement, Roles, ServiceClass


@dataclass(frozen=True)
class LoadOrder:
    instance_id: str
    worker_id: str
    roles: Roles


@dataclass(frozen=True)
class Hop:
    """A host of a load: its store gets the pack from ``sources`` (best first), then its workers load it."""

    store_id: str
    sources: tuple[str, ...]
    loads: tuple[LoadOrder, ...]
    num_striped: int = 1  # number of sources that are followed at once
    urgent: bool = True  # for a load; False: it takes only the bandwidth that other transfers leave


@dataclass(frozen=True)
class LoadCommand:
    """Hops are relayed in order; each host's loads start right after its own relay."""

    model: Model
    hops: tuple[Hop, ...]
    traceparent: str = ""  # of the request that caused the load


@dataclass(frozen=True)
class RerouteCommand:
    """Gives a running relay other sources; the bytes that it has received stay."""

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
    """Makes a copy that no request waits for; with ``keep_retained``, without evicting a retained copy."""

    model: Model
    hop: Hop  # without loads
    urgent: bool
    keep_retained: bool


@dataclass(frozen=True)
class RetainCommand:
    """Makes a store retain these packs for the lease, in RAM and on disk, and evict them in this order if it must."""

    store_id: str
    pack_ids: tuple[str, ...]
    lease_s: float
    disk_pack_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class DisconnectCommand:
    """Closes the channels to a peer that hangs, which ends all calls that wait for its answer."""

    address: str


Command = (
    LoadCommand | RerouteCommand | SetRolesCommand | UnloadCommand | CopyCommand | RetainCommand | DisconnectCommand
)


class RefusalReason(enum.IntEnum):
    """Reason of a refusal; the numbers are those of the protocol."""

    QUEUE_FULL = 1
    NO_CAPACITY = 2
    LOAD_FAILED = 3
    TOO_LONG = 6


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
    """Asks the gateway to end the attempt and ask for another, if the attempt has not begun.

    ``keeps_prompt``: its worker is loading and keeps what it has computed for the next attempt.
    """

    gateway_id: str
    key: AttemptKey
    keeps_prompt: bool = False


Answer = Placed | AdmissionRefused | Recall


@dataclass(frozen=True)
class LoadNotice:
    """Tells a gateway how long its requests wait for a model that no instance serves yet; see ``Loading`` in the
    protocol.
    """

    gateway_id: str
    version_id: str
    has_slot: bool
    num_layers_ready: int
    num_layers: int
    left_s: float


@dataclass(frozen=True)
class SchedulerEvent:
    """A decision or a transition, shown by Explain; also published to the history if it has a ``topic``."""

    at: float
    kind: str  # "load", "place", "drain", "set_roles", "ready", ...
    model: str
    subject: str  # instance or model
    reason: str
    topic: str = ""  # "instance.ready", "scale.up", ...
    fields: Mapping[str, str | int | float] = field(default_factory=dict)
    bytes_by_source: Mapping[str, int] = field(default_factory=dict)  # for a relay that has ended
    aliases: tuple[str, ...] = ()  # models that share the version, if there are several
    by_tenant: Mapping[str, str] = field(default_factory=dict)  # the reason that each tenant may see; see ``Reason``


class AttemptPlaced(msgspec.Struct, frozen=True, gc=False):
    """A placement of an attempt, with times for its timeline."""

    key: AttemptKey
    model: str
    admitted_at: float
    placed_at: float
    placement: Placement
    traceparent: str = ""
    service_class: ServiceClass = ServiceClass.STANDARD
    ttft_target_s: float = 0.0  # from ``admitted_at`` on; 0: the request has its first token already
    tbt_target_s: float = 0.0


@dataclass(slots=True)
class Effects:
    """All effects of one input, in order."""

    commands: list[Command] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    notices: list[LoadNotice] = field(default_factory=list)
    events: list[SchedulerEvent] = field(default_factory=list)
    opened: list[AttemptPlaced] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.commands or self.answers or self.notices or self.events or self.opened)
