"""The state of the one slot of a worker.

    Free --Load--> Loading --the engine computes all layers--> Ready --Unload--> Draining --last request ended--> Free
                      |                                                             ^
                      |--the bytes stopped coming, or the engine did not start--> Free (with an error)
                      `--Unload-----------------------------------------------------'

The scheduler moves the slot by Load and Unload; the loader and the drain make the other moves. Watchers see every
change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torchrelay.common.clock import now_unix_us
from torchrelay.common.epoch_fence import EpochFence
from torchrelay.common.errors import Conflict
from torchrelay.control.v1 import reports_pb2, types_pb2
from torchrelay.worker.metrics.step_floor import StepFloor
from torchrelay.worker.metrics.step_metrics import InstanceLabels

FREE = reports_pb2.SlotState.STATE_FREE
LOADING = reports_pb2.SlotState.STATE_LOADING
READY = reports_pb2.SlotState.STATE_READY
DRAINING = reports_pb2.SlotState.STATE_DRAINING


@dataclass(slots=True)
class HostedInstance:
    """The instance in the slot."""

    instance_id: str
    version: types_pb2.ModelVersion
    roles: list[types_pb2.Role.ValueType]
    num_layers_ready: int = 0
    loaded_share: float = 0.0  # of the pack's bytes
    step_floor: StepFloor | None = None  # None: not built yet, or unknown
    phases: list[types_pb2.Phase] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # built, or given up

    def metric_labels(self) -> InstanceLabels:
        """The labels of its engine steps in metrics."""
        roles = "+".join(types_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in sorted(self.roles))
        return InstanceLabels(self.instance_id, self.version.model, self.version.pack_id, roles)


class Slot:
    """The hosted instance and its state; watchers can wait for changes."""

    def __init__(self) -> None:
        self.state: reports_pb2.SlotState.State.ValueType = FREE
        self.hosted: HostedInstance | None = None
        self.instance_labels: InstanceLabels | None = None  # of ``hosted``; read at every step
        self.error = ""  # why the load of ``failed_instance_id`` failed; cleared by the next Load
        self.failed_instance_id = ""
        self.failed_model = ""
        self.store_was_lost = False  # whether that load failed because the store could not be reached
        self.epoch = EpochFence()
        self._changed = asyncio.Condition()
        self._version = 0
        self._is_closed = False
        self.is_leaving = False  # the process was told to end, and loads nothing more

    def require_instance(self, instance_id: str) -> HostedInstance:
        """The instance in the slot. Raises ``Conflict`` if it is not ``instance_id``."""
        if self.hosted is None or self.hosted.instance_id != instance_id:
            hosted_id = self.hosted.instance_id if self.hosted else "no instance"
            raise Conflict(f"this worker hosts {hosted_id}, not {instance_id}", field="instance_id")
        return self.hosted

    def serving_instance(self, instance_id: str, role: types_pb2.Role.ValueType) -> HostedInstance | None:
        """The instance ``instance_id`` if it is here, takes requests and plays ``role``."""
        hosted = self.hosted
        if hosted is None or hosted.instance_id != instance_id or self.state not in (LOADING, READY):
            return None
        return hosted if role in hosted.roles else None

    async def begin_load(self, hosted: HostedInstance) -> None:
        """Free -> Loading. Raises ``Conflict`` if the slot is taken, or its worker leaves."""
        if self.is_leaving:
            raise Conflict("this worker leaves, and loads nothing more", field="instance_id")
        if self.state != FREE:
            raise Conflict(
                f"the slot is taken by {self.hosted.instance_id if self.hosted else '?'}", field="instance_id"
            )
        self.hosted, self.error, self.failed_instance_id, self.store_was_lost = hosted, "", "", False
        self.failed_model = ""
        self.instance_labels = hosted.metric_labels()
        await self.move(LOADING)

    async def release(self, error: str = "", store_was_lost: bool = False) -> None:
        """Any state -> Free. ``store_was_lost``: the load failed with ``error`` as its store could not be reached."""
        if self.hosted is not None:
            self.hosted.settled.set()
            self.failed_instance_id = self.hosted.instance_id if error else ""
            self.failed_model = self.hosted.version.model if error else ""
        self.hosted, self.instance_labels, self.error, self.store_was_lost = None, None, error, store_was_lost
        await self.move(FREE)

    async def move(self, state: reports_pb2.SlotState.State.ValueType) -> None:
        self.state = state
        await self.notify_watchers()

    async def set_roles(self, roles: Sequence[types_pb2.Role.ValueType]) -> None:
        if self.hosted is not None:
            self.hosted.roles = list(roles)
            self.instance_labels = self.hosted.metric_labels()
        await self.notify_watchers()

    def add_phase(self, name: str, begin_us: int) -> None:
        """Records a phase of the load that began at ``begin_us`` and ends now."""
        if self.hosted is not None:
            self.hosted.phases.append(types_pb2.Phase(name=name, begin_unix_us=begin_us, end_unix_us=now_unix_us()))

    async def notify_watchers(self) -> None:
        """Wakes the watchers."""
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def leave(self) -> None:
        """Takes no more loads, and reports that the worker leaves."""
        self.is_leaving = True
        await self.notify_watchers()

    async def close(self) -> None:
        """Ends the watchers' streams, which tells the scheduler that the worker leaves."""
        self._is_closed = True
        await self.notify_watchers()

    async def changes(self, at_most_s: float | None = None) -> AsyncIterator[bool]:
        """Yields True at once, then after every change (several may be merged), until the slot is closed.

        Yields False after each ``at_most_s`` without a change.
        """
        seen = -1
        while True:
            async with self._changed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(at_most_s):
                        while seen == self._version:
                            await self._changed.wait()
                has_changed, seen = seen != self._version, self._version
                if self._is_closed:
                    return
            yield has_changed

    def report(self) -> reports_pb2.SlotState:
        hosted = self.hosted
        if hosted is None:
            return reports_pb2.SlotState(
                state=self.state, model=self.failed_model, error=self.error, store_was_lost=self.store_was_lost
            )
        return reports_pb2.SlotState(
            state=self.state,
            instance_id=hosted.instance_id,
            model=hosted.version.model,
            version_id=hosted.version.version_id,
            pack_id=hosted.version.pack_id,
            roles=hosted.roles,
            num_layers_ready=hosted.num_layers_ready,
            num_layers=hosted.version.shape.num_layers,
            loaded_share=hosted.loaded_share,
            load_phases=hosted.phases,
            error=self.error,
        )
