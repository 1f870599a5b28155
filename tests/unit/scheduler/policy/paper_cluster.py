"""A cluster without processes for tests of the policy: its workers and stores obey at once, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from msgspec import structs

from tests.unit.scheduler.policy.invariants import check_state
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.config import ROUND_S, PolicyConfig
from torchrelay.scheduler.policy.dispatch.placement import NoPlacement, place
from torchrelay.scheduler.policy.effects import (
    AdmissionRefused,
    Answer,
    AttemptPlaced,
    Command,
    CopyCommand,
    Effects,
    LoadCommand,
    Placed,
    RetainCommand,
    SchedulerEvent,
    SetRolesCommand,
    UnloadCommand,
)
from torchrelay.scheduler.policy.inputs import (
    Admit,
    Beat,
    CommandEnded,
    CommandOutcome,
    Copy,
    FirstToken,
    GatewayChanged,
    Input,
    Load,
    PeerGone,
    Release,
    RoleChange,
    StoreReported,
    Tick,
    Unload,
    WorkerReported,
)
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import (
    BOTH,
    Admission,
    AttemptKey,
    InstancePhase,
    Model,
    PackCopy,
    Peer,
    Placement,
    Role,
    Roles,
    SlotStatus,
    StoreStatus,
    WorkerStatus,
)
from torchrelay.scheduler.service.input_log import InputRecorder, PolicyStart

MB = 1 << 20
ROUNDING_S = 1e-9  # of sums of seconds
NUM_CHUNKS = 8
PREFILL, DECODE = frozenset((Role.PREFILL,)), frozenset((Role.DECODE,))


def a_model(name: str = "acme/tiny", **changes: object) -> Model:
    model = Model(name, f"version of {name}", f"pack of {name}", 32 * MB, kv_bytes_per_token=1024)
    return replace(model, **changes)  # type: ignore[arg-type]


def a_worker(worker_id: str, host_id: str = "host-1", playable_roles: Roles = BOTH, **changes: object) -> WorkerStatus:
    worker = WorkerStatus(
        worker_id=worker_id,
        incarnation=f"{worker_id} first",
        host_id=host_id,
        grpc_address=f"{worker_id}:1",
        playable_roles=playable_roles,
        seen_at=0.0,
        kv_pool_bytes=64 * MB,
    )
    return replace(worker, **changes)  # type: ignore[arg-type]


def a_pair(prefill_id: str, decode_id: str, host_id: str = "host-1") -> tuple[WorkerStatus, WorkerStatus]:
    """Workers that the operator has set apart, one for each role; both can play both."""
    return (
        a_worker(prefill_id, host_id, preferred_role=Role.PREFILL),
        a_worker(decode_id, host_id, preferred_role=Role.DECODE),
    )


def a_store(store_id: str, host_id: str, copies: Iterable[PackCopy] = (), arena_bytes: int = 1024 * MB) -> StoreStatus:
    held = {copy.pack_id: copy for copy in copies}
    return StoreStatus(store_id, f"{store_id} first", host_id, f"{store_id}:1", f"{store_id}:2", 0.0, arena_bytes, held)


def a_copy(model: Model, num_verified: int = NUM_CHUNKS) -> PackCopy:
    return PackCopy(model.pack_id, model.pack_bytes, NUM_CHUNKS, num_verified)


def a_slot(
    model: Model,
    instance_id: str,
    roles: Roles = BOTH,
    phase: InstancePhase = InstancePhase.READY,
    num_ready: int = 4,
    num_layers: int = 4,
) -> SlotStatus:
    return SlotStatus(phase, instance_id, model.name, model.version_id, model.pack_id, roles, num_ready, num_layers)


def an_instance(
    model: Model,
    worker: WorkerStatus,
    roles: Roles = BOTH,
    phase: InstancePhase = InstancePhase.READY,
    **changes: object,
) -> Instance:
    instance = Instance(
        f"i-{worker.worker_id}", model.name, model.version_id, model.pack_id, worker.worker_id, worker.incarnation,
        worker.host_id, roles, phase, since=0.0, created_at=-1e6, accepted_at=1.0,
    )  # fmt: skip
    return replace(instance, **changes)  # type: ignore[arg-type]


def an_admission(model: Model, request_id: str, attempt: int = 1, now: float = 0.0, **changes: object) -> Admission:
    admission = Admission(
        AttemptKey(request_id, attempt), "gateway-1", model.version_id, 100, 0, 50, 1, admitted_at=now, model=model.name
    )
    return structs.replace(admission, **changes)


@dataclass
class PaperCluster:
    """The policy, its cluster, and all its effects. ``obedient``: commands succeed at once."""

    config: PolicyConfig = field(default_factory=PolicyConfig)
    obedient: bool = True
    now: float = 1000.0
    log: BinaryIO | None = None  # where inputs are recorded
    policy: Policy = field(init=False)
    recorder: InputRecorder | None = field(init=False, default=None)
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    stores: dict[str, StoreStatus] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    events: list[SchedulerEvent] = field(default_factory=list)
    opened: list[AttemptPlaced] = field(default_factory=list)
    effects: list[Effects] = field(default_factory=list)  # of each input
    failing_workers: set[str] = field(default_factory=set)
    retained_packs: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start = PolicyStart(self.config, self.now, "inst")
        self.policy = start.policy()
        if self.log is not None:
            self.recorder = InputRecorder(self.log, start)
        self.apply(GatewayChanged("gateway-1", True))

    def settle(self, *peers: WorkerStatus | StoreStatus) -> PaperCluster:
        """Adds the peers, and passes the time after a start in which slots may appear."""
        for peer in peers:
            if isinstance(peer, WorkerStatus):
                self.workers[peer.worker_id] = peer
            else:
                self.stores[peer.store_id] = peer
        self.pass_time(0.1)
        self.pass_time(self.config.refusal_settle_s - 0.5, step_s=0.5)
        self.pass_time(0.4)
        return self

    def pass_time_with_beats(self, seconds: float, step_s: float = 0.5) -> None:
        """The broker is away: nobody reports, and everybody lives."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step_s, end)
            self.policy.state.round_due = self.now  # no round is late, as in the service
            for worker in self.workers.values():
                self.apply(Beat(Peer(worker.worker_id), worker.incarnation, worker.progress))
            for store in self.stores.values():
                self.apply(Beat(Peer(store.store_id, True), store.incarnation))
            self.apply(Tick())

    def pass_time(self, seconds: float, step_s: float = 0.1) -> None:
        """Reports and ticks go on as they do in the service."""
        end = self.now + seconds
        while (begin := self.now) < end:
            self.now = min(begin + min(step_s, ROUND_S) / 2, end)
            self.tick()  # a turn
            step_end = begin + step_s
            self.now = min(step_end, end) if abs(step_end - end) > ROUNDING_S else max(step_end, end)
            self.report_all()
            self.tick()

    def tick(self) -> None:
        """Does everything that is due."""
        while self.policy.next_due() <= self.now:
            self._apply(Tick())

    def report_all(self) -> None:
        for store in list(self.stores.values()):
            self.apply(StoreReported(replace(store, seen_at=self.now), streamed=True))
        for worker_id in list(self.workers):
            self.report(worker_id)

    def report(self, worker_id: str) -> None:
        worker = replace(self.workers[worker_id], seen_at=self.now)
        self.apply(WorkerReported(worker, True))

    def admit(
        self, model: Model, request_id: str, attempt: int = 1, current: Placement | None = None, **changes: object
    ) -> Admission:
        self.models[model.version_id] = model
        admission = an_admission(model, request_id, attempt, self.now, **changes)
        self.apply(Admit(admission, model, current))
        return admission

    def serve(self, model: Model, request_id: str, attempt: int = 1, **changes: Any) -> Placement:
        """Admits a request, and finishes the loads that it needs."""
        self.admit(model, request_id, attempt, **changes)
        self.finish_loads()
        return self.placed(request_id, attempt)

    def warm_up(self, model: Model, **changes: Any) -> None:
        """Loads the model by a request that ends."""
        admission = self.admit(model, "cold", **changes)
        self.finish_loads()
        self.apply(FirstToken(admission.key))
        self.release("cold")

    def release(
        self, request_id: str, attempt: int = 1, delivered: bool = True, outcome: Outcome | None = None
    ) -> None:
        self.apply(Release(AttemptKey(request_id, attempt), delivered, outcome))

    def apply(self, input_: Input) -> None:
        """Applies the input. Then requests are placed if they may be."""
        self._apply(input_)
        if self.policy.state.placing_due <= self.now:
            self._apply(Tick())

    def _apply(self, input_: Input) -> None:
        if self.recorder is not None:
            self.recorder.record(input_, self.now)
        effects = self.policy.apply(input_, self.now)
        self.effects.append(effects)
        self.do(effects)

    def do(self, effects: Effects) -> None:
        self.answers += effects.answers
        self.events += effects.events
        self.opened += effects.opened
        self.commands += effects.commands
        if self.obedient:
            for command in effects.commands:
                self.obey(command)

    def obey(self, command: Command) -> None:
        if isinstance(command, LoadCommand):
            for hop in command.hops:
                for order in hop.loads:
                    self.load(order.instance_id, order.worker_id, order.roles, command.model)
        elif isinstance(command, SetRolesCommand):
            self.check_given_up_roles(command)
            if command.worker_id not in self.workers:
                self.apply(CommandEnded(RoleChange(command.instance_id), CommandOutcome.REFUSED, "the worker is gone"))
                return
            self.set_slot(command.worker_id, roles=command.roles)
            self.apply(CommandEnded(RoleChange(command.instance_id), CommandOutcome.ACCEPTED))
        elif isinstance(command, CopyCommand):
            self.copy(command.model, command.hop.store_id)
        elif isinstance(command, RetainCommand):
            self.retained_packs[command.store_id] = command.pack_ids
        elif isinstance(command, UnloadCommand) and command.worker_id not in self.workers:
            self.apply(CommandEnded(Unload(command.instance_id), CommandOutcome.REFUSED, "the worker is gone"))
        elif isinstance(command, UnloadCommand):
            self.workers[command.worker_id] = replace(self.workers[command.worker_id], slot=SlotStatus())
            self.report(command.worker_id)

    def load(self, instance_id: str, worker_id: str, roles: Roles, model: Model) -> None:
        if worker_id in self.failing_workers or worker_id not in self.workers:
            self.apply(CommandEnded(Load(instance_id), CommandOutcome.REFUSED, f"{worker_id} is broken"))
            return
        slot = a_slot(model, instance_id, roles, InstancePhase.LOADING, 0)
        self.workers[worker_id] = replace(self.workers[worker_id], slot=slot)
        self.apply(CommandEnded(Load(instance_id), CommandOutcome.ACCEPTED))
        self.report(worker_id)

    def copy(self, model: Model, store_id: str) -> None:
        """The store takes the order, and has the whole pack at once."""
        self.apply(CommandEnded(Copy(model.pack_id, store_id), CommandOutcome.ACCEPTED))
        self.hold(store_id, model)

    def hold(self, store_id: str, model: Model, **changes: object) -> None:
        store = self.stores[store_id]
        copy = replace(a_copy(model), **changes)  # type: ignore[arg-type]
        self.stores[store_id] = replace(store, copies={**store.copies, model.pack_id: copy})

    def set_slot(self, worker_id: str, **changes: object) -> None:
        worker = self.workers[worker_id]
        self.workers[worker_id] = replace(worker, slot=replace(worker.slot, **changes))  # type: ignore[arg-type]

    def finish_loads(self) -> None:
        """Every loading instance becomes ready."""
        for worker_id, worker in self.workers.items():
            if worker.slot.phase is InstancePhase.LOADING:
                self.set_slot(worker_id, phase=InstancePhase.READY, num_layers_ready=4)
                self.report(worker_id)

    def kill(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.apply(PeerGone(Peer(worker_id)))

    def placement(self, request_id: str, attempt: int = 1) -> Placement | None:
        key = AttemptKey(request_id, attempt)
        placed = [answer.placement for answer in self.answers if isinstance(answer, Placed)]
        placements = [placement for placement in placed if placement.key == key]
        return placements[-1] if placements else None

    def placed(self, request_id: str, attempt: int = 1) -> Placement:
        """The placement, which there must be."""
        placement = self.placement(request_id, attempt)
        assert placement is not None, (request_id, attempt)
        return placement

    def refused(self, request_id: str, attempt: int = 1) -> AdmissionRefused:
        """The refusal, which there must be."""
        refusal = self.refusal(request_id, attempt)
        assert refusal is not None, (request_id, attempt)
        return refusal

    def refusal(self, request_id: str, attempt: int = 1) -> AdmissionRefused | None:
        key = AttemptKey(request_id, attempt)
        return next((a for a in self.answers if isinstance(a, AdmissionRefused) and a.key == key), None)

    def loads(self) -> list[LoadCommand]:
        return [command for command in self.commands if isinstance(command, LoadCommand)]

    def unloads(self) -> list[UnloadCommand]:
        return [command for command in self.commands if isinstance(command, UnloadCommand)]

    def told(self, kind: str = "", topic: str = "") -> list[SchedulerEvent]:
        """The events of this kind, or with this topic."""
        return [event for event in self.events if event.kind == (kind or event.kind) and topic in ("", event.topic)]

    def kinds(self) -> list[str]:
        return [happening.kind for happening in self.events]

    def check_given_up_roles(self, command: SetRolesCommand) -> None:
        """Checks that other instances of the model play the roles that an instance gives up."""
        instance = self.policy.state.instances.get(command.instance_id)
        assert instance is not None
        of_version = self.policy.state.instances.of_version(instance.version_id)
        others = [other.target_roles for other in of_version if other.staying and other is not instance]
        assert instance.roles <= command.roles.union(*others)

    def check(self) -> None:
        check_state(self.policy.state)


def one_host(*peers: WorkerStatus | StoreStatus | str, store: StoreStatus | None = None, **config: Any) -> PaperCluster:
    """A host with a store; a name stands for a worker that plays both roles."""
    named = (a_worker(peer) if isinstance(peer, str) else peer for peer in peers)
    return PaperCluster(PolicyConfig(**config)).settle(store or a_store("store-1", "host-1"), *named)


def two_workers_one_host(**config: Any) -> PaperCluster:
    """The embedded install: one host, a prefill and a decode worker that can each play both roles."""
    return one_host(*a_pair("w-a", "w-b"), **config)


def hosts(num_hosts: int, **config: object) -> PaperCluster:
    """``num_hosts`` hosts with a prefill and a decode worker each."""
    scene = PaperCluster(PolicyConfig(**config))  # type: ignore[arg-type]
    peers: list[WorkerStatus | StoreStatus] = []
    for number in range(1, num_hosts + 1):
        host_id = f"host-{number}"
        peers += [a_store(f"store-{number}", host_id), *a_pair(f"p-{number}", f"d-{number}", host_id)]
    return scene.settle(*peers)


def two_hosts() -> PaperCluster:
    """A host whose worker prefills, and a host whose worker decodes."""
    scene = PaperCluster(PolicyConfig())
    workers = a_worker("p", "host-1", PREFILL, has_prefix_cache=True), a_worker("d", "host-2", DECODE)
    return scene.settle(a_store("store-1", "host-1"), a_store("store-2", "host-2"), *workers)


class CountedPlacements:
    """The scheduler's own, and how many instances each looked at."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, *args: Any) -> Placement | NoPlacement:
        _, _, _, prefills, decodes, _ = args
        self.numbers.append(len({*prefills, *decodes}))
        return place(*args)
