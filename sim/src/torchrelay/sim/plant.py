"""The simulated cluster: hosts, stores, workers and gateways that do what a policy commands, and report to it.

The policy is whatever takes inputs and gives effects: the scheduler's own, or a rival's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.policy.core import (
    BOTH,
    REMOTE,
    Admission,
    AttemptKey,
    InstancePhase,
    Model,
    PackCopy,
    Placement,
    Roles,
    SlotStatus,
    SourceShare,
    StoreStatus,
    WorkerStatus,
)
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.sim.engine import Decoding, Prompt, SimulatedEngine
from torchrelay.sim.events import Event, EventQueue
from torchrelay.sim.flows import FluidNetwork, Link, Stream, Transfer
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome, ServedModel

GATEWAY = "gateway"
NUM_CHUNKS = 256
RPC_S = 0.001  # one way: a call, an answer, a report
KV_FIXED_S = 0.002  # offer, reservation and the last layer's KV
KV_LEFT = 0.05  # of the KV is still to be sent when the prompt is computed: layers stream while later ones are computed
REPORT_EVERY_S = 1.0
TICK_S = 0.1


class SimulatedPolicy(Protocol):
    def apply(self, input_: inputs.Input, now: float) -> effects.Effects: ...
    def next_due(self) -> float: ...


@dataclass(eq=False)
class Attempt:
    """One attempt at a request, from its placement on."""

    outcome: RequestOutcome
    key: AttemptKey
    placement: Placement
    placed_at: float
    num_forced: int = 0  # tokens that earlier attempts have given
    job: Prompt | Decoding | None = None  # what runs now
    kv_event: Event | None = None
    computed_at: float = 0.0

    @property
    def is_whole(self) -> bool:
        return not self.placement.needs_kv_transfer


@dataclass(eq=False)
class SimulatedWorker:
    """One slot."""

    worker_id: str
    host: SimulatedHost
    num_devices: int
    engine: SimulatedEngine | None = None
    slot: SlotStatus = field(default_factory=SlotStatus)
    attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)
    loaded: Event | None = None
    begun_at: float = 0.0  # since when the slot is not free


@dataclass(eq=False)
class SimulatedHost:
    host_id: str
    store_id: str
    copies: dict[str, Transfer | None] = field(default_factory=dict)  # by pack, the longest unused first; None: whole
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # followed at once, by pack
    retained: tuple[str, ...] = ()
    waiting: dict[str, list[SimulatedWorker]] = field(default_factory=dict)  # for the whole pack
    workers: list[SimulatedWorker] = field(default_factory=list)


@dataclass
class Spent:
    """Device seconds from the order to load until the slot is free again, and bytes of packs in RAM over time."""

    device_s: float = 0.0
    ram_byte_s: float = 0.0
    num_loads: int = 0


class Plant:
    """Owner of everything that is simulated."""

    def __init__(
        self, policy: SimulatedPolicy, fleet: Fleet, models: Iterable[ServedModel], idle_timeout_s: float = 0.0
    ) -> None:
        self.events = EventQueue(now=1000.0)
        self.policy, self.fleet = policy, fleet
        self.served = {model.name: model for model in models}
        self.models = {model.name: _model(model, idle_timeout_s) for model in self.served.values()}
        self.spent = Spent()
        self._due_at = math.inf
        self._due_event: Event | None = None
        self.outcomes: list[RequestOutcome] = []
        self._open: dict[AttemptKey, RequestOutcome] = {}
        self._forced: dict[AttemptKey, int] = {}
        self._running: dict[AttemptKey, Attempt] = {}
        self.hosts: dict[str, SimulatedHost] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        capacity: dict[Link, float] = {}
        for number in range(fleet.num_hosts):
            host = SimulatedHost(f"host-{number}", f"store-{number}")
            self.hosts[host.store_id] = host
            capacity |= {
                ("out", host.store_id): fleet.nic_bytes_per_s,
                ("in", host.store_id): fleet.nic_bytes_per_s,
                ("disk", host.store_id): fleet.disk_bytes_per_s,
            }
            for place, num_devices in enumerate(fleet.groups):
                worker = SimulatedWorker(f"worker-{number}-{place}", host, num_devices)
                self.workers[worker.worker_id] = worker
                host.workers.append(worker)
        self.network = FluidNetwork(self.events, capacity)
        self._ram_at, self._ram_bytes = self.events.now, 0
        self._kv_pool_bytes = {
            size: max(int(0.9 * size * fleet.device_memory_bytes) - self._largest_pack_bytes(size), 1 << 30)
            for size in set(fleet.groups)
        }

    def _largest_pack_bytes(self, num_devices: int) -> int:
        return max((each.pack_bytes for each in self.served.values() if each.num_devices == num_devices), default=0)

    # Running

    def run(self, requests: Sequence[Request], settle_s: float = 5.0) -> list[RequestOutcome]:
        """Everything from the cluster's start until the last request has ended and all slots are free again."""
        self._apply(inputs.GatewayConnected(GATEWAY))
        self._report_all()
        self._tick()
        self.events.run(self.events.now + settle_s)
        begin = self.events.now
        for request in requests:
            self.events.at(begin + request.arrives_at, partial(self._arrive, request))
        self.begin = begin
        last = begin + max((request.arrives_at for request in requests), default=0.0)
        self.events.run(last)
        self.at_last_arrival = self.spent_now()
        while self._open or self._running:
            before = self.events.now
            self.events.run(before + 1.0)
            if self.events.now > last + 3600:
                break
        return self.outcomes

    def spent_now(self) -> Spent:
        """So far, with what is still held."""
        now = self.events.now
        held = sum((now - w.begun_at) * w.num_devices for w in self.workers.values() if w.begun_at)
        self._count_ram()
        return Spent(self.spent.device_s + held, self.spent.ram_byte_s, self.spent.num_loads)

    def _tick(self) -> None:
        self._apply(inputs.Tick())
        self.events.after(TICK_S, self._tick)

    def _apply(self, input_: inputs.Input) -> None:
        self._carry_out(self.policy.apply(input_, self.events.now))
        due = self.policy.next_due()
        if due < self._due_at:
            if self._due_event is not None:
                self._due_event.cancel()
            self._due_at = due
            self._due_event = self.events.at(due, self._due)

    def _due(self) -> None:
        self._due_at = math.inf
        self._apply(inputs.Due())

    def _soon(self, input_: inputs.Input) -> None:
        """The input arrives after one call's time."""
        self.events.after(RPC_S, partial(self._apply, input_))

    def _carry_out(self, caused: effects.Effects) -> None:
        for command in caused.commands:
            match command:
                case effects.WakeCommand():
                    self.events.after(RPC_S, partial(self._wake, command))
                case effects.UnloadCommand():
                    self.events.after(RPC_S, partial(self._unload, command))
                case effects.SetRolesCommand():
                    self.events.after(RPC_S, partial(self._set_roles, command))
                case effects.CopyCommand():
                    self.events.after(RPC_S, partial(self._copy, command))
                case effects.RerouteCommand():
                    self.events.after(RPC_S, partial(self._reroute, command))
                case effects.RetainCommand():
                    self.hosts[command.store_id].retained = command.pack_ids
                case effects.DisconnectCommand():
                    pass
        for answer in caused.answers:
            match answer:
                case effects.Placed():
                    self.events.after(RPC_S, partial(self._start, answer.placement))
                case effects.AdmissionRefused():
                    if (outcome := self._open.pop(answer.key, None)) is not None:
                        outcome.is_refused = True
                case effects.Waiting():
                    pass

    # Requests

    def _arrive(self, request: Request) -> None:
        outcome = RequestOutcome(
            Request(
                request.request_id,
                self.events.now,
                request.model,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.tenant,
            )
        )
        self.outcomes.append(outcome)
        self._admit(outcome, AttemptKey(request.request_id, 1), 0)

    def _admit(self, outcome: RequestOutcome, key: AttemptKey, num_forced: int) -> None:
        request, model = outcome.request, self.models[outcome.request.model]
        admission = Admission(
            key=key,
            gateway_id=GATEWAY,
            version_id=model.version_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_forced_tokens=num_forced,
            max_tokens=request.max_tokens,
            num_choices=1,
            admitted_at=self.events.now,
            model=model.name,
            ttft_target_s=self.served[model.name].ttft_target_s(request.num_prompt_tokens),
        )
        self._open[key], self._forced[key] = outcome, num_forced
        self._apply(inputs.Admit(admission, model))

    def _start(self, placement: Placement) -> None:
        """The gateway opens the attempt at both workers."""
        key = placement.key
        outcome = self._open.pop(key, None)
        if outcome is None:
            return
        now = self.events.now
        attempt = Attempt(outcome, key, placement, now, self._forced.pop(key))
        outcome.placed_at = outcome.placed_at or now
        outcome.was_cold = outcome.was_cold or placement.cold
        outcome.predicted_ttft_s = outcome.predicted_ttft_s or placement.predicted.ttft_s
        self._running[key] = attempt
        workers = [self._host_of(ref.worker_id, ref.instance_id) for ref in (placement.prefill, placement.decode)]
        if None in workers:
            self._fail(attempt)
            return
        for worker in workers:
            assert worker is not None
            worker.attempts[key] = attempt
        prefill = workers[0]
        assert prefill is not None and prefill.engine is not None
        num_tokens = outcome.request.num_prompt_tokens + attempt.num_forced
        attempt.job = Prompt(max(num_tokens, 1), partial(self._computed, attempt))
        prefill.engine.prefill(attempt.job)

    def _host_of(self, worker_id: str, instance_id: str) -> SimulatedWorker | None:
        """The worker, if it has this instance and takes requests for it."""
        worker = self.workers[worker_id]
        takes = worker.slot.instance_id == instance_id and worker.slot.phase is not InstancePhase.DRAINING
        return worker if takes else None

    def _computed(self, attempt: Attempt) -> None:
        """The prompt's first token is there."""
        outcome, now = attempt.outcome, self.events.now
        outcome.first_token_at = outcome.first_token_at or now + RPC_S
        attempt.job, attempt.computed_at = None, now
        self._soon(inputs.FirstToken(attempt.key))
        if outcome.request.num_output_tokens - attempt.num_forced <= 1:
            self._end(attempt)
            return
        if attempt.is_whole:
            self._decode(attempt)
            return
        num_tokens = outcome.request.num_prompt_tokens + attempt.num_forced
        kv_bytes = num_tokens * self.served[outcome.request.model].kv_bytes_per_token
        source = self.workers[attempt.placement.prefill.worker_id].host
        target = self.workers[attempt.placement.decode.worker_id].host
        rate = self.fleet.device_bytes_per_s if source is target else self.fleet.nic_bytes_per_s
        attempt.kv_event = self.events.after(KV_FIXED_S + KV_LEFT * kv_bytes / rate, partial(self._decode, attempt))

    def _decode(self, attempt: Attempt) -> None:
        attempt.kv_event = None
        request, worker = attempt.outcome.request, self.workers[attempt.placement.decode.worker_id]
        if not attempt.is_whole:
            self._leave(attempt, attempt.placement.prefill.worker_id)
        assert worker.engine is not None
        left = request.num_output_tokens - attempt.num_forced - 1
        attempt.job = Decoding(request.num_prompt_tokens + attempt.num_forced + 1, left, partial(self._end, attempt))
        worker.engine.decode(attempt.job)

    def _end(self, attempt: Attempt) -> None:
        now, placement = self.events.now, attempt.placement
        attempt.outcome.ended_at = now + RPC_S
        self._running.pop(attempt.key, None)
        for ref in (placement.prefill, placement.decode):
            self._leave(attempt, ref.worker_id)
        num_steps = attempt.outcome.request.num_output_tokens - attempt.num_forced - 1
        decode_s = now - attempt.computed_at
        outcome = Outcome(
            ttft_s=attempt.computed_at - attempt.placed_at,
            tbt_s=decode_s / num_steps if num_steps > 0 else None,
            ended_at=now,
            num_output_tokens=attempt.outcome.request.num_output_tokens - attempt.num_forced,
        )
        self._soon(inputs.Release(attempt.key, True, outcome))

    def _leave(self, attempt: Attempt, worker_id: str) -> None:
        worker = self.workers[worker_id]
        worker.attempts.pop(attempt.key, None)
        if worker.slot.phase is InstancePhase.DRAINING and not worker.attempts:
            self._free(worker)

    def _fail(self, attempt: Attempt) -> None:
        """The attempt is over without its end: the gateway asks for another one, which continues it."""
        self._running.pop(attempt.key, None)
        given = attempt.num_forced + (attempt.computed_at > 0)
        if attempt.kv_event is not None:
            attempt.kv_event.cancel()
        for ref in (attempt.placement.prefill, attempt.placement.decode):
            worker = self.workers[ref.worker_id]
            if attempt.key in worker.attempts and worker.engine is not None and attempt.job is not None:
                if isinstance(attempt.job, Decoding) and ref is attempt.placement.decode:
                    given += worker.engine.num_tokens_done(attempt.job)
                worker.engine.cancel(attempt.job)
            self._leave(attempt, ref.worker_id)
        self._apply(inputs.Release(attempt.key, given > attempt.num_forced))
        attempt.outcome.num_attempts += 1
        key = AttemptKey(attempt.key.request_id, attempt.key.attempt + 1)
        self._admit(attempt.outcome, key, min(given, attempt.outcome.request.num_output_tokens - 1))

    # Stores

    def _wake(self, command: effects.WakeCommand) -> None:
        for hop in command.hops:
            self._relay(command.model, hop)
            for order in hop.loads:
                self._load(command.model, order)

    def _copy(self, command: effects.CopyCommand) -> None:
        host = self.hosts[command.hop.store_id]
        is_held = command.model.pack_id in host.copies
        if not is_held and command.keep_retained and not self._has_room(host, command.model):
            self._apply(inputs.CopyFailed(command.model.pack_id, host.store_id, "no room"))
            return
        self._relay(command.model, command.hop)
        self._apply(inputs.CopyAccepted(command.model.pack_id, host.store_id))

    def _reroute(self, command: effects.RerouteCommand) -> None:
        host, pack_id = self.hosts[command.hop.store_id], command.model.pack_id
        transfer = host.copies.get(pack_id)
        if transfer is not None and not transfer.is_complete:
            sources = self._sources(host, pack_id, command.hop)
            host.sources[pack_id] = sources
            self.network.redirect(transfer, self._streams(host, pack_id, sources))

    def _relay(self, model: Model, hop: effects.Hop) -> None:
        host, pack_id = self.hosts[hop.store_id], model.pack_id
        if pack_id in host.copies:
            host.copies[pack_id] = host.copies.pop(pack_id)  # now the one used last
            return
        self._make_room(host, model)
        self._count_ram(model.pack_bytes)
        sources = self._sources(host, pack_id, hop)
        host.sources[pack_id] = sources
        streams = self._streams(host, pack_id, sources)
        host.copies[pack_id] = self.network.begin(model.pack_bytes, streams, partial(self._arrived, host, pack_id))
        self._report_store(host)

    def _sources(self, host: SimulatedHost, pack_id: str, hop: effects.Hop) -> tuple[str, ...]:
        """Those followed at once that have the pack or receive it; without any, the disk."""
        having = [
            source
            for source in hop.sources
            if source != REMOTE and source != host.store_id and pack_id in self.hosts[source].copies
        ]
        return tuple(having[: max(hop.num_striped, 1)]) or (REMOTE,)

    def _streams(self, host: SimulatedHost, pack_id: str, sources: Sequence[str]) -> list[Stream]:
        into = ("in", host.store_id)
        return [
            Stream((("disk", host.store_id),))
            if source == REMOTE
            else Stream((("out", source), into), self.hosts[source].copies[pack_id])
            for source in sources
        ]

    def _arrived(self, host: SimulatedHost, pack_id: str) -> None:
        host.copies[pack_id] = None
        for worker in host.waiting.pop(pack_id, []):
            self._pack_is_there(worker)
        self._report_store(host)

    def _pinned(self, host: SimulatedHost) -> set[str]:
        return {worker.slot.pack_id for worker in host.workers if worker.slot.pack_id}

    def _has_room(self, host: SimulatedHost, model: Model) -> bool:
        kept = self._pinned(host) | set(host.retained)
        used = sum(self._pack_bytes(pack_id) for pack_id in host.copies if pack_id in kept)
        return used + model.pack_bytes <= self.fleet.arena_bytes

    def _make_room(self, host: SimulatedHost, model: Model) -> None:
        """Evicts unpinned packs: those that are not retained first, the longest unused first."""
        used = sum(map(self._pack_bytes, host.copies))
        pinned = self._pinned(host)
        order = sorted(host.copies, key=lambda pack_id: pack_id in host.retained)
        for pack_id in order:
            if used + model.pack_bytes <= self.fleet.arena_bytes:
                return
            transfer = host.copies[pack_id]
            if pack_id not in pinned and transfer is None:
                self._count_ram(-self._pack_bytes(pack_id))
                del host.copies[pack_id]
                used -= self._pack_bytes(pack_id)

    def _pack_bytes(self, pack_id: str) -> int:
        return self.served[pack_id].pack_bytes

    def _count_ram(self, change_bytes: int = 0) -> None:
        """Until now; from now on ``change_bytes`` more are held."""
        passed_s, self._ram_at = self.events.now - self._ram_at, self.events.now
        self.spent.ram_byte_s += passed_s * self._ram_bytes
        self._ram_bytes += change_bytes

    # Workers

    def _load(self, model: Model, order: effects.LoadOrder) -> None:
        worker, now = self.workers[order.worker_id], self.events.now
        served = self.served[model.name]
        if worker.slot.phase is not InstancePhase.FREE:
            self._soon(inputs.LoadRefused(order.instance_id, "the slot is taken"))
            return
        worker.slot = SlotStatus(
            InstancePhase.LOADING,
            order.instance_id,
            model.name,
            model.version_id,
            model.pack_id,
            order.roles,
            0,
            served.num_layers,
        )
        worker.begun_at = now
        self.spent.num_loads += 1
        worker.engine = SimulatedEngine(self.events, served.latency, ready_at=math.inf)
        if worker.host.copies.get(model.pack_id) is None:
            self._pack_is_there(worker)
        else:
            worker.host.waiting.setdefault(model.pack_id, []).append(worker)
        self._soon(inputs.LoadAccepted(order.instance_id))
        self._report_worker(worker)

    def _pack_is_there(self, worker: SimulatedWorker) -> None:
        """In host memory, whole. What arrived over the network went on into the device as it came."""
        served = self.served[worker.slot.pack_id]
        copy_s = served.pack_bytes / (self.fleet.device_bytes_per_s * worker.num_devices)
        end = max(worker.begun_at + copy_s, self.events.now + copy_s / NUM_CHUNKS)
        assert worker.engine is not None
        worker.engine.now_ready_at(end)
        worker.loaded = self.events.at(end, partial(self._loaded, worker))

    def _loaded(self, worker: SimulatedWorker) -> None:
        worker.loaded = None
        if worker.slot.phase is InstancePhase.LOADING:
            worker.slot = _changed(worker.slot, InstancePhase.READY)
            self._report_worker(worker)

    def _set_roles(self, command: effects.SetRolesCommand) -> None:
        worker = self.workers[command.worker_id]
        if worker.slot.instance_id != command.instance_id:
            self._soon(inputs.RolesFailed(command.instance_id, "the instance is gone"))
            return
        worker.slot = _changed(worker.slot, worker.slot.phase, command.roles)
        self._soon(inputs.RolesSet(command.instance_id))
        self._report_worker(worker)

    def _unload(self, command: effects.UnloadCommand) -> None:
        worker = self.workers[command.worker_id]
        if worker.slot.instance_id != command.instance_id:
            return
        worker.slot = _changed(worker.slot, InstancePhase.DRAINING)
        if not worker.attempts:
            self._free(worker)
            return
        self._report_worker(worker)
        self.events.after(command.drain_s, partial(self._end_drain, worker, command.instance_id))

    def _end_drain(self, worker: SimulatedWorker, instance_id: str) -> None:
        if worker.slot.instance_id == instance_id:
            for attempt in list(worker.attempts.values()):
                self._fail(attempt)
            if worker.slot.instance_id == instance_id:
                self._free(worker)

    def _free(self, worker: SimulatedWorker) -> None:
        if worker.loaded is not None:
            worker.loaded.cancel()
            worker.loaded = None
        waiting = worker.host.waiting.get(worker.slot.pack_id, [])
        if worker in waiting:
            waiting.remove(worker)
        self.spent.device_s += (self.events.now - worker.begun_at) * worker.num_devices
        worker.slot, worker.engine, worker.begun_at = SlotStatus(), None, 0.0
        self._report_worker(worker)

    # Reports

    def _report_all(self) -> None:
        for host in self.hosts.values():
            self._apply(inputs.StoreReported(self._store_status(host)))
        for worker in self.workers.values():
            self._apply(inputs.WorkerReported(self._worker_status(worker), True))
        self.events.after(REPORT_EVERY_S, self._report_all)

    def _report_worker(self, worker: SimulatedWorker) -> None:
        self._soon(inputs.WorkerReported(self._worker_status(worker), True))

    def _report_store(self, host: SimulatedHost) -> None:
        self._soon(inputs.StoreReported(self._store_status(host)))

    def _worker_status(self, worker: SimulatedWorker) -> WorkerStatus:
        engine, slot = worker.engine, worker.slot
        latency = self.served[slot.pack_id].latency if slot.pack_id else None
        queued = engine.num_queued_tokens if engine is not None else 0
        return WorkerStatus(
            worker_id=worker.worker_id,
            incarnation=worker.worker_id,
            host_id=worker.host.host_id,
            grpc_address=worker.worker_id,
            playable_roles=BOTH,
            seen_at=self.events.now,
            slot=slot,
            kv_pool_bytes=self._kv_pool_bytes[worker.num_devices],
            num_running=engine.num_running if engine is not None else 0,
            num_queued_prefill_tokens=queued,
            prefill_tokens_per_s=self.served[slot.pack_id].prefill_tokens_per_s if slot.pack_id else 0.0,
            device=f"{worker.num_devices} devices",
            latency=latency,
            queued_prefill_s=latency.queued_s(queued) if latency is not None else 0.0,
            num_devices=worker.num_devices,
        )

    def _store_status(self, host: SimulatedHost) -> StoreStatus:
        pinned = self._pinned(host)
        return StoreStatus(
            store_id=host.store_id,
            incarnation=host.store_id,
            host_id=host.host_id,
            grpc_address=host.store_id,
            data_address=host.store_id,
            seen_at=self.events.now,
            arena_target_bytes=self.fleet.arena_bytes,
            copies={pack_id: self._copy_status(host, pack_id, pack_id in pinned) for pack_id in host.copies},
            failure_domain=host.host_id,
        )

    def _copy_status(self, host: SimulatedHost, pack_id: str, is_pinned: bool) -> PackCopy:
        transfer, size = host.copies[pack_id], self._pack_bytes(pack_id)
        if transfer is None:
            return PackCopy(pack_id, size, NUM_CHUNKS, NUM_CHUNKS, int(is_pinned), retained=pack_id in host.retained)
        verified = int(self.network.received(transfer) / size * NUM_CHUNKS)
        shares = tuple(
            SourceShare(source, 0, stream.bytes_per_s, following=True)
            for source, stream in zip(host.sources[pack_id], transfer.streams, strict=True)
        )
        return PackCopy(pack_id, size, NUM_CHUNKS, verified, 1, source=host.sources[pack_id][0], shares=shares)


def _changed(slot: SlotStatus, phase: InstancePhase, roles: Roles | None = None) -> SlotStatus:
    num_ready = slot.num_layers if phase is InstancePhase.READY else slot.num_layers_ready
    return SlotStatus(
        phase,
        slot.instance_id,
        slot.model,
        slot.version_id,
        slot.pack_id,
        slot.roles if roles is None else roles,
        num_ready,
        slot.num_layers,
    )


def _model(served: ServedModel, idle_timeout_s: float) -> Model:
    return Model(
        name=served.name,
        version_id=f"version of {served.name}",
        pack_id=served.name,
        pack_bytes=served.pack_bytes,
        kv_bytes_per_token=served.kv_bytes_per_token,
        idle_timeout_s=idle_timeout_s,
        num_devices=served.num_devices,
    )
