"""All inputs of the policy, as one tagged union. Times are by the scheduler's clock."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from torchrelay.common.liveness import NO_ENGINE, EngineProgress
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import Admission, AttemptKey, Model, Peer, Placement, StoreStatus, WorkerStatus


class _Input(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    pass


class Admit(_Input, frozen=True):
    """A gateway asks for an attempt, for the first time or again. ``current``: its placement, if it was placed.
    ``is_computed``: it has its first token.
    """

    admission: Admission
    model: Model
    current: Placement | None = None
    is_computed: bool = False


class Withdraw(_Input, frozen=True):
    """The client left before the attempt was placed."""

    key: AttemptKey


class FirstToken(_Input, frozen=True):
    """The first token has arrived, so the prefill instance has finished this attempt."""

    key: AttemptKey


class Release(_Input, frozen=True):
    """The attempt is over. ``delivered``: it produced at least one token. ``outcome``: its measurements.
    ``is_recalled``: it had not begun, and the request will be admitted again. ``goes_on``: the answer continues in
    another attempt.
    """

    key: AttemptKey
    delivered: bool
    outcome: Outcome | None = None
    is_recalled: bool = False
    goes_on: bool = False


class MinimumsSet(_Input, frozen=True):
    """All models that have a minimum of instances, as the last gateway reported them."""

    models: tuple[Model, ...]


class ModelDeleted(_Input, frozen=True):
    """The model is no longer in the catalog; its running requests continue."""

    model: str


class LauncherReported(_Input, frozen=True):
    """``waits``: why the workers that a launcher starts do not run yet."""

    waits: str


class GatewayChanged(_Input, frozen=True):
    gateway_id: str
    is_connected: bool


class WorkerReported(_Input, frozen=True):
    """A worker's report. ``streamed``: on the worker's own stream, which preserves order."""

    worker: WorkerStatus
    streamed: bool


class StoreReported(_Input, frozen=True):
    """A store's report. ``streamed``: on the store's own stream, which preserves order."""

    store: StoreStatus
    streamed: bool


class Beat(_Input, frozen=True):
    """A heartbeat on the peer's own stream. ``progress``: of a worker's engine."""

    peer: Peer
    incarnation: str
    progress: EngineProgress = NO_ENGINE


class StreamClosed(_Input, frozen=True):
    """The stream of a worker is closed: its slot may be taken from any report."""

    worker_id: str


class PeerGone(_Input, frozen=True):
    """The peer's process is gone, as its address refuses connections. ``is_stopped``: it announced that it shuts down,
    as workers do.
    The arena of a store and the instances in it may live on.
    """

    peer: Peer
    is_stopped: bool = False


class _CommandId(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    pass


class Load(_CommandId, frozen=True):
    """``failed_store``: the store that did not accept the relay, while the worker may have accepted the load."""

    instance_id: str
    failed_store: str = ""


class RoleChange(_CommandId, frozen=True):
    instance_id: str


class Unload(_CommandId, frozen=True):
    instance_id: str


class Copy(_CommandId, frozen=True):
    pack_id: str
    store_id: str


class Retention(_CommandId, frozen=True):
    store_id: str


CommandId = Load | RoleChange | Unload | Copy | Retention


class CommandOutcome(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"  # or its peer was not reached
    UNANSWERED = "unanswered"  # the deadline passed; the peer's reports will show whether it was accepted
    NOT_FOUND = "not_found"  # refused, because its object does not exist; of a copy: the pack exists nowhere any more


class CommandEnded(_Input, frozen=True):
    """The call of a command has ended. ``cause``: why it was not accepted."""

    command: CommandId
    outcome: CommandOutcome
    cause: str = ""


class Tick(_Input, frozen=True):
    """Something is due by time alone; see ``Policy.next_due``. ``listening_since``: silence before this time does not
    count, as no reports could arrive.
    """

    listening_since: float = 0.0


Input = (
    Admit
    | Withdraw
    | FirstToken
    | Release
    | MinimumsSet
    | ModelDeleted
    | LauncherReported
    | GatewayChanged
    | WorkerReported
    | StoreReported
    | Beat
    | StreamClosed
    | PeerGone
    | CommandEnded
    | Tick
)
