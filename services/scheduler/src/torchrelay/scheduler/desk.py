"""The desk: feeds the policy what happens, and sees to what it wants done. Nothing here waits for anything.

Everything runs on the event loop's thread, one input at a time, so the policy needs no lock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from torchrelay.common.telemetry import get_logger, record_span
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler import relay_events, wire
from torchrelay.scheduler.copy_metrics import CopyMetrics
from torchrelay.scheduler.core import AttemptKey
from torchrelay.scheduler.effects import Answer, Command, Effects, Opened, Placed, Refused
from torchrelay.scheduler.epoch import Epoch
from torchrelay.scheduler.explain import Explain
from torchrelay.scheduler.history import History
from torchrelay.scheduler.metrics import Metrics
from torchrelay.scheduler.policy import Policy
from torchrelay.scheduler.prediction import outcome_of
from torchrelay.scheduler.relay_metrics import RelayMetrics
from torchrelay.scheduler.streams import AdmitStreams
from torchrelay.scheduler.ticketing import Ticketing

log = get_logger(__name__)

_MAX_VERSIONS = 8192


class Clock:
    """Seconds since the Unix epoch that never go back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset_s + time.monotonic()


class Actuating(Protocol):
    def start(self, command: Command) -> None:
        """Begins to carry a command out; its outcome comes back to the desk."""

    def stop(self) -> None:
        """Nothing more is begun."""


class Desk:
    """Owner of the policy in the service."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        epoch: Epoch,
        streams: AdmitStreams,
        ticketing: Ticketing,
        explain: Explain,
        history: History,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.epoch = epoch
        self.streams = streams
        self.ticketing = ticketing
        self.explain = explain
        self.actuator: Actuating | None = None  # set once, before anything is admitted
        self.worker_reports: dict[str, reports_pb2.WorkerReport] = {}
        self.store_reports: dict[str, reports_pb2.StoreReport] = {}
        self._versions: dict[str, types_pb2.ModelVersion] = {}
        self._history = history
        self._watchers: set[asyncio.Event] = set()
        self._metrics = Metrics(lambda: len(policy.state.queues), lambda: history.num_dropped)
        self._copy_metrics = CopyMetrics(lambda: policy.state.copybook)
        self._relay_metrics = RelayMetrics(lambda: policy.state.courses.num_running)

    # Gateways

    def gateway_arrived(self, gateway_id: str) -> None:
        self._apply(self.policy.gateway_arrived(gateway_id, self.clock.now()))

    def gateway_left(self, gateway_id: str) -> None:
        self._apply(self.policy.gateway_left(gateway_id, self.clock.now()))

    def admit(self, gateway_id: str, request: scheduler_pb2.AdmitRequest) -> None:
        now = self.clock.now()
        admission = wire.admission_of(request, gateway_id, now)
        current = wire.placement_of(request.current, admission.key) if request.HasField("current") else None
        self._note_version(request.version)
        self._apply(self.policy.admit(admission, wire.model_of(request.version), current, now))

    def withdraw(self, key: AttemptKey) -> None:
        self._apply(self.policy.withdraw(key, self.clock.now()))

    def release(self, release: scheduler_pb2.Release) -> None:
        key = wire.key_of(release.key)
        phases = wire.phases_of(release.phases)
        self.explain.released(key, phases)
        attempt = self.policy.state.books.get(key)
        outcome = None
        if attempt is not None:
            outcome = outcome_of(phases, release.num_output_tokens, attempt.admission.num_choices)
            self.explain.foretold(key, attempt.placement, outcome)
            self._metrics.foretold(attempt.placement, outcome)
        self._apply(self.policy.release(key, release.ttft_s > 0, self.clock.now(), outcome))

    def version(self, version_id: str) -> types_pb2.ModelVersion:
        """A version as its last admission named it."""
        return self._versions[version_id]

    def _note_version(self, version: types_pb2.ModelVersion) -> None:
        self._versions.pop(version.version_id, None)
        self._versions[version.version_id] = version
        if len(self._versions) > _MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]

    # The cluster

    def worker_reported(self, report: reports_pb2.WorkerReport, streamed: bool) -> None:
        """Raises ``StaleEpoch`` when the worker obeys a newer scheduler."""
        now = self.clock.now()
        self.epoch.seen(report.epoch, now)
        worker = wire.worker_of(report, now)
        self._apply(self.policy.worker_reported(worker, streamed, now))
        if report.worker_id in self.policy.state.view.workers:
            self.worker_reports[report.worker_id] = report
        self._observe(report.worker_id)
        self._touch()

    def store_reported(self, report: reports_pb2.StoreReport) -> None:
        """Raises ``StaleEpoch`` when the store obeys a newer scheduler."""
        now = self.clock.now()
        self.epoch.seen(report.epoch, now)
        self._apply(self.policy.store_reported(wire.store_of(report, now), now))
        if report.store_id in self.policy.state.view.stores:
            self.store_reports[report.store_id] = report
        for instance in self.policy.state.fleet:
            if instance.host_id == report.host_id:
                self._observe(instance.worker_id)
        self._touch()

    def _observe(self, worker_id: str) -> None:
        """Keeps what the instance's load tells of itself."""
        state = self.policy.state
        worker, instance = state.view.workers.get(worker_id), state.fleet.on_worker(worker_id)
        if worker is None or instance is None:
            return
        store = state.view.store_of(instance.host_id)
        copy = store.copies.get(instance.pack_id) if store else None
        self.explain.observe(instance, worker.slot, store.store_id if store else "", copy)

    def worker_stream_closed(self, worker_id: str) -> None:
        self._apply(self.policy.worker_stream_closed(worker_id, self.clock.now()))

    def worker_left(self, worker_id: str) -> None:
        self._apply(self.policy.worker_left(worker_id, self.clock.now()))

    def worker_gone(self, worker_id: str) -> None:
        self._apply(self.policy.worker_gone(worker_id, self.clock.now()))

    def store_gone(self, store_id: str) -> None:
        self._apply(self.policy.store_gone(store_id, self.clock.now()))

    # Outcomes

    def load_accepted(self, instance_id: str) -> None:
        self._apply(self.policy.load_accepted(instance_id, self.clock.now()))

    def load_failed(self, instance_id: str, cause: str, relay_failed: str = "") -> None:
        self._apply(self.policy.load_failed(instance_id, cause, self.clock.now(), relay_failed))

    def roles_set(self, instance_id: str) -> None:
        self._apply(self.policy.roles_set(instance_id, self.clock.now()))

    def roles_failed(self, instance_id: str, cause: str) -> None:
        self._apply(self.policy.roles_failed(instance_id, cause, self.clock.now()))

    def unload_failed(self, instance_id: str, cause: str) -> None:
        self._apply(self.policy.unload_failed(instance_id, cause, self.clock.now()))

    def copy_begun(self, pack_id: str, store_id: str) -> None:
        self._apply(self.policy.copy_begun(pack_id, store_id, self.clock.now()))

    def copy_failed(self, pack_id: str, store_id: str, cause: str, gone: bool = False) -> None:
        self._apply(self.policy.copy_failed(pack_id, store_id, cause, self.clock.now(), gone))

    def guard_failed(self, store_id: str) -> None:
        self._apply(self.policy.guard_failed(store_id, self.clock.now()))

    def tick(self, heard_since: float) -> None:
        self._apply(self.policy.tick(self.clock.now(), heard_since))
        self._forget_lost()

    def _forget_lost(self) -> None:
        view = self.policy.state.view
        for worker_id in self.worker_reports.keys() - view.workers.keys():
            del self.worker_reports[worker_id]
        for store_id in self.store_reports.keys() - view.stores.keys():
            del self.store_reports[store_id]

    # Effects

    def _apply(self, effects: Effects) -> None:
        if not effects:
            return
        for command in effects.commands:
            assert self.actuator is not None
            self.actuator.start(command)
        for answer in effects.answers:
            self._send(answer)
        for opened in effects.opened:
            self._opened(opened)
        for happening in effects.happenings:
            if not happening.event.startswith(relay_events.EVENTS):  # those are the operator's
                self.explain.happened(happening)
            self._history.note(happening)
            self._copy_metrics.happened(happening)
            self._relay_metrics.happened(happening)
            log.info(happening.kind, model=happening.model, subject=happening.subject, reason=happening.reason)
        self._touch()

    def _send(self, answer: Answer) -> None:
        event = scheduler_pb2.AdmitEvent()
        if isinstance(answer, Placed):
            ticket = self.ticketing.kv(answer.placement)
            event.placement.CopyFrom(wire.placement_to_wire(answer.placement, ticket))
        elif isinstance(answer, Refused):
            event.refusal.key.CopyFrom(wire.key_to_wire(answer.key))
            event.refusal.reason = wire.REFUSALS[answer.reason]
            event.refusal.message = answer.message
            event.refusal.retry_after_s = answer.retry_after_s
        else:
            event.waiting.key.CopyFrom(wire.key_to_wire(answer.key))
            event.waiting.queue_position = answer.queue_position
            event.waiting.state = answer.state
            event.waiting.predicted_wait_s = answer.predicted_wait_s
        self._metrics.answered(type(answer).__name__.lower())
        self.streams.send(answer.gateway_id, event)

    def _opened(self, opened: Opened) -> None:
        self.explain.opened(opened)
        self._metrics.placed(opened.placed_at - opened.admitted_at, opened.placement.cold)
        begin_ns, end_ns = int(opened.admitted_at * 1e9), int(opened.placed_at * 1e9)
        if opened.traceparent:
            request_id = opened.key.request_id
            record_span("scheduler.admit", opened.traceparent, begin_ns, end_ns, request_id=request_id)

    # Watchers of the cluster

    def watch(self) -> asyncio.Event:
        """An event set at every change, for ``unwatch`` to give back."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    def _touch(self) -> None:
        for event in self._watchers:
            event.set()
