"""Everything that can happen to the policy, as one tagged union of frozen records.

What carries times of its own (``admitted_at``, ``seen_at``) was stamped by the scheduler's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torchrelay.scheduler.policy.core import Admission, AttemptKey, Model, Placement, StoreStatus, WorkerStatus
from torchrelay.scheduler.policy.prediction import Outcome

# Requests


@dataclass(frozen=True)
class Admit:
    """A gateway asks for an attempt, for the first time or again. ``current``: where it runs, if it was placed."""

    admission: Admission
    model: Model
    current: Placement | None = None


@dataclass(frozen=True)
class Withdraw:
    """The client left before the attempt was placed."""

    key: AttemptKey


@dataclass(frozen=True)
class Release:
    """The attempt is over. ``delivered``: it produced at least one token. ``outcome``: what was measured of it."""

    key: AttemptKey
    delivered: bool
    outcome: Outcome | None = None


@dataclass(frozen=True)
class GatewayConnected:
    gateway_id: str


@dataclass(frozen=True)
class GatewayDisconnected:
    gateway_id: str


# The cluster


@dataclass(frozen=True)
class WorkerReported:
    """``streamed``: on the worker's own stream, which keeps order."""

    worker: WorkerStatus
    streamed: bool


@dataclass(frozen=True)
class WorkerStreamClosed:
    worker_id: str


@dataclass(frozen=True)
class WorkerGone:
    """Nobody listens at the worker's address any more."""

    worker_id: str


@dataclass(frozen=True)
class WorkerStopped:
    """The worker announced that it shuts down."""

    worker_id: str


@dataclass(frozen=True)
class StoreReported:
    store: StoreStatus


@dataclass(frozen=True)
class StoreGone:
    """Nobody listens at the store's address any more; its arena, and the instances in it, may live on."""

    store_id: str


# Outcomes of commands


@dataclass(frozen=True)
class LoadAccepted:
    instance_id: str


@dataclass(frozen=True)
class LoadFailed:
    """``failed_store``: the store whose relay could not be started, if that was the reason."""

    instance_id: str
    cause: str
    failed_store: str = ""


@dataclass(frozen=True)
class RolesSet:
    instance_id: str


@dataclass(frozen=True)
class RolesFailed:
    instance_id: str
    cause: str


@dataclass(frozen=True)
class UnloadFailed:
    instance_id: str
    cause: str


@dataclass(frozen=True)
class CopyAccepted:
    pack_id: str
    store_id: str


@dataclass(frozen=True)
class CopyFailed:
    """The store did not take the order. ``deleted``: the pack exists nowhere any more."""

    pack_id: str
    store_id: str
    cause: str
    deleted: bool = False


@dataclass(frozen=True)
class RetainFailed:
    store_id: str


# Time


@dataclass(frozen=True)
class Tick:
    """Time has passed. Reports may be missing from before ``reports_complete_since``: silence until then is no loss."""

    reports_complete_since: float = 0.0


Input = (
    Admit
    | Withdraw
    | Release
    | GatewayConnected
    | GatewayDisconnected
    | WorkerReported
    | WorkerStreamClosed
    | WorkerGone
    | WorkerStopped
    | StoreReported
    | StoreGone
    | LoadAccepted
    | LoadFailed
    | RolesSet
    | RolesFailed
    | UnloadFailed
    | CopyAccepted
    | CopyFailed
    | RetainFailed
    | Tick
)

INPUT_TYPES: dict[str, type[Input]] = {kind.__name__: kind for kind in get_args(Input)}
