"""Simulated workers: slots that load packs from the store of their host, compute and drain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.policy.inputs import CommandEnded, CommandOutcome
from torchrelay.scheduler.policy.types import (
    BOTH,
    AttemptKey,
    InstancePhase,
    Model,
    Peer,
    Role,
    SlotStatus,
    WorkerStatus,
)
from torchrelay.sim.engine import SimulatedEngine
from torchrelay.sim.events import Event, EventQueue
from torchrelay.sim.flows import NUM_CHUNKS
from torchrelay.sim.scenario import Fleet, ServedModel
from torchrelay.sim.scheduler import SimulatedScheduler
from torchrelay.sim.spent import Meter
from torchrelay.sim.stores import SimulatedStore


@dataclass(eq=False)
class SimulatedWorker:
    """A worker with one slot."""

    worker_id: str
    store: SimulatedStore
    num_devices: int
    engine: SimulatedEngine | None = None
    slot: SlotStatus = field(default_factory=SlotStatus)
    attempts: dict[AttemptKey, Callable[[], None]] = field(default_factory=dict)  # called if the attempt is cut off
    prefixes: set[str] = field(default_factory=set)  # beginnings of prompts that its engine has computed
    slowness: float = 1.0  # its steps take this many times what its reports predict
    preferred_role: Role | None = None
    loaded: Event | None = None
    begun_at: float = 0.0  # when the slot was taken; 0: free
    num_starts: int = 1  # of its process
    is_up: bool = True

    def takes(self, instance_id: str) -> bool:
        """Whether the slot holds this instance and accepts requests for it."""
        return self.slot.instance_id == instance_id and self.slot.phase is not InstancePhase.DRAINING


class SimulatedWorkers:
    def __init__(
        self,
        events: EventQueue,
        fleet: Fleet,
        served: Mapping[str, ServedModel],
        meter: Meter,
        scheduler: SimulatedScheduler,
        stores: Mapping[str, SimulatedStore],
        slowness: Mapping[str, float],
        preferred_roles: Mapping[str, Role],
    ) -> None:
        self._events, self._fleet, self._served = events, fleet, served
        self._meter, self._scheduler = meter, scheduler
        self.of: dict[str, SimulatedWorker] = {}
        for number, store in enumerate(stores.values()):
            for place, num_devices in enumerate(fleet.groups):
                worker_id = f"worker-{number}-{place}"
                slow, role = slowness.get(worker_id, 1.0), preferred_roles.get(worker_id)
                worker = SimulatedWorker(worker_id, store, num_devices, slowness=slow, preferred_role=role)
                self.of[worker_id] = worker
        self._kv_pool_bytes = {
            size: max(int(0.9 * size * fleet.device_memory_bytes) - self._largest_pack_bytes(size), 1 << 30)
            for size in set(fleet.groups)
        }

    def _largest_pack_bytes(self, num_devices: int) -> int:
        return max((model.pack_bytes for model in self._served.values() if model.num_devices == num_devices), default=0)

    @property
    def held_device_s(self) -> float:
        """Device seconds until now of slots that are taken."""
        now = self._events.now
        return sum((now - worker.begun_at) * worker.num_devices for worker in self.of.values() if worker.begun_at)

    def num_slots(self, phase: InstancePhase) -> int:
        return sum(worker.slot.phase is phase for worker in self.of.values())

    # Commands

    def load(self, model: Model, order: effects.LoadOrder) -> None:
        worker, served = self.of[order.worker_id], self._served[model.pack_id]
        if worker.slot.phase is not InstancePhase.FREE or not worker.is_up:
            why = "the slot is taken" if worker.is_up else "its worker is not reached"
            self._scheduler.soon(CommandEnded(inputs.Load(order.instance_id), CommandOutcome.REFUSED, why))
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
        worker.begun_at = self._events.now
        worker.store.pins[worker.worker_id] = model.pack_id
        self._meter.spent.num_loads += 1
        worker.engine = SimulatedEngine(self._events, served.latency.slower(worker.slowness), ready_at=math.inf)
        worker.store.when_whole(model.pack_id, worker.worker_id, partial(self._pack_arrived, worker))
        self._scheduler.soon(CommandEnded(inputs.Load(order.instance_id), CommandOutcome.ACCEPTED))
        self._report(worker)

    def set_roles(self, command: effects.SetRolesCommand) -> None:
        worker = self.of[command.worker_id]
        if worker.slot.instance_id != command.instance_id:
            self._scheduler.soon(
                CommandEnded(inputs.RoleChange(command.instance_id), CommandOutcome.REFUSED, "the instance is gone")
            )
            return
        worker.slot = replace(worker.slot, roles=command.roles)
        self._scheduler.soon(CommandEnded(inputs.RoleChange(command.instance_id), CommandOutcome.ACCEPTED))
        self._report(worker)

    def unload(self, command: effects.UnloadCommand) -> None:
        worker = self.of[command.worker_id]
        if worker.slot.instance_id != command.instance_id:
            return
        worker.slot = replace(worker.slot, phase=InstancePhase.DRAINING)
        if not worker.attempts:
            self._free(worker)
            return
        self._report(worker)
        self._events.after(command.drain_s, partial(self._end_drain, worker, command.instance_id))

    def leave(self, worker_id: str, key: AttemptKey) -> None:
        """Removes an attempt that has ended."""
        worker = self.of[worker_id]
        worker.attempts.pop(key, None)
        if worker.slot.phase is InstancePhase.DRAINING and not worker.attempts:
            self._free(worker)

    # Life cycle of a slot

    def _pack_arrived(self, worker: SimulatedWorker) -> None:
        """Schedules the end of the load. Bytes go on into the device as they arrive in host memory."""
        served = self._served[worker.slot.pack_id]
        copy_s = served.pack_bytes / (self._fleet.device_bytes_per_s * worker.num_devices)
        end = max(worker.begun_at + copy_s, self._events.now + copy_s / NUM_CHUNKS)
        assert worker.engine is not None
        worker.engine.set_ready_at(end)
        worker.loaded = self._events.at(end, partial(self._loaded, worker))

    def _loaded(self, worker: SimulatedWorker) -> None:
        worker.loaded = None
        if worker.slot.phase is InstancePhase.LOADING:
            worker.slot = replace(worker.slot, phase=InstancePhase.READY, num_layers_ready=worker.slot.num_layers)
            self._report(worker)

    def _end_drain(self, worker: SimulatedWorker, instance_id: str) -> None:
        if worker.slot.instance_id == instance_id:
            self._end_attempts(worker)
            if worker.slot.instance_id == instance_id:
                self._free(worker)

    def _end_attempts(self, worker: SimulatedWorker) -> None:
        for cut_off in list(worker.attempts.values()):
            cut_off()

    def fail(self, worker: SimulatedWorker, *, is_noticed: bool) -> None:
        """Ends the worker's process with all that it runs. ``is_noticed``: the scheduler need not wait for silence."""
        worker.is_up = False
        if is_noticed:
            self._scheduler.apply(inputs.PeerGone(Peer(worker.worker_id)))
        self._end_attempts(worker)
        if worker.slot.phase is not InstancePhase.FREE:
            self._free(worker)

    def start(self, worker: SimulatedWorker) -> None:
        """Starts the process of a worker that failed."""
        worker.is_up = True
        worker.num_starts += 1
        self._report(worker)

    def _free(self, worker: SimulatedWorker) -> None:
        if worker.loaded is not None:
            worker.loaded.cancel()
            worker.loaded = None
        worker.store.cancel_wait(worker.slot.pack_id, worker.worker_id)
        worker.store.pins.pop(worker.worker_id, None)
        self._meter.spent.device_s += (self._events.now - worker.begun_at) * worker.num_devices
        worker.slot, worker.engine, worker.begun_at = SlotStatus(), None, 0.0
        worker.prefixes.clear()
        self._report(worker)

    # Reports

    def report_all(self) -> None:
        for worker in self.of.values():
            if worker.is_up:
                self._scheduler.apply(inputs.WorkerReported(self._status(worker), True))

    def _report(self, worker: SimulatedWorker) -> None:
        if worker.is_up:
            self._scheduler.soon(inputs.WorkerReported(self._status(worker), True))

    def _status(self, worker: SimulatedWorker) -> WorkerStatus:
        engine, slot = worker.engine, worker.slot
        latency = self._served[slot.pack_id].latency if slot.pack_id else None
        return WorkerStatus(
            worker_id=worker.worker_id,
            incarnation=f"{worker.worker_id} {worker.num_starts}",
            host_id=worker.store.host_id,
            grpc_address=worker.worker_id,
            playable_roles=BOTH,
            seen_at=self._events.now,
            slot=slot,
            kv_pool_bytes=self._kv_pool_bytes[worker.num_devices],
            num_running=engine.num_running if engine is not None else 0,
            prefill_tokens_per_s=self._served[slot.pack_id].prefill_tokens_per_s if slot.pack_id else 0.0,
            device=f"{worker.num_devices} devices",
            latency=latency,
            num_devices=worker.num_devices,
            preferred_role=worker.preferred_role,
            has_prefix_cache=True,
        )
