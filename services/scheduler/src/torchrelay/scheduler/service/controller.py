"""The desk: feeds the policy what happens, and sees to what it wants done. Nothing here waits for anything.

Everything runs on the event loop's thread, one input at a time, so the policy needs no lock.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from torchrelay.common.process.telemetry import get_logger, record_span
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler.policy.core import AttemptKey
from torchrelay.scheduler.policy.effects import AdmissionRefused, Answer, AttemptPlaced, Command, Effects, Placed
from torchrelay.scheduler.policy.explain import ExplainLog
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.prediction import outcome_of
from torchrelay.scheduler.policy.relay import transfer_events
from torchrelay.scheduler.service import converters
from torchrelay.scheduler.service.admit_streams import AdmitStreams
from torchrelay.scheduler.service.epoch import Epoch
from torchrelay.scheduler.service.events.publisher import EventPublisher
from torchrelay.scheduler.service.metrics.admission import AdmissionMetrics
from torchrelay.scheduler.service.metrics.relay import RelayMetrics
from torchrelay.scheduler.service.metrics.replication import ReplicationMetrics
from torchrelay.scheduler.service.tickets import ClusterTickets

log = get_logger(__name__)

_MAX_VERSIONS = 8192


class Clock:
    """Seconds since the Unix epoch that never go back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset_s + time.monotonic()


class CommandExecutor(Protocol):
    def start(self, command: Command) -> None:
        """Begins to carry a command out; its outcome comes back to the desk."""

    def stop(self) -> None:
        """Nothing more is begun."""


class Controller:
    """Owner of the policy in the service."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        epoch: Epoch,
        streams: AdmitStreams,
        cluster_tickets: ClusterTickets,
        explain: ExplainLog,
        event_publisher: EventPublisher,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.epoch = epoch
        self.streams = streams
        self.cluster_tickets = cluster_tickets
        self.explain = explain
        self.actuator: CommandExecutor | None = None  # set once, before anything is admitted
        self.worker_reports: dict[str, reports_pb2.WorkerReport] = {}
        self.store_reports: dict[str, reports_pb2.StoreReport] = {}
        self._versions: dict[str, types_pb2.ModelVersion] = {}
        self._event_publisher = event_publisher
        self._watchers: set[asyncio.Event] = set()
        self._metrics = AdmissionMetrics(lambda: len(policy.state.queues), lambda: event_publisher.num_dropped)
        self._copy_metrics = ReplicationMetrics(lambda: policy.state.replication_state)
        self._relay_metrics = RelayMetrics(lambda: policy.state.transfers.num_running)

    # Gateways

    def gateway_arrived(self, gateway_id: str) -> None:
        self._apply(self.policy.gateway_arrived(gateway_id, self.clock.now()))

    def gateway_left(self, gateway_id: str) -> None:
        self._apply(self.policy.gateway_left(gateway_id, self.clock.now()))

    def admit(self, gateway_id: str, request: scheduler_pb2.AdmitRequest) -> None:
        now = self.clock.now()
        admission = converters.admission_from_proto(request, gateway_id, now)
        current = (
            converters.placement_from_proto(request.current, admission.key) if request.HasField("current") else None
        )
        self._note_version(request.version)
        self._apply(self.policy.admit(admission, converters.model_from_proto(request.version), current, now))

    def withdraw(self, key: AttemptKey) -> None:
        self._apply(self.policy.withdraw(key, self.clock.now()))

    def release(self, release: scheduler_pb2.Release) -> None:
        key = converters.key_from_proto(release.key)
        phases = converters.phases_from_proto(release.phases)
        self.explain.released(key, phases)
        attempt = self.policy.state.reservations.get(key)
        outcome = None
        if attempt is not None:
            outcome = outcome_of(phases, release.num_output_tokens, attempt.admission.num_choices)
            self.explain.record_accuracy(key, attempt.placement, outcome)
            self._metrics.record_accuracy(attempt.placement, outcome)
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
        self.epoch.check(report.epoch, now)
        worker = converters.worker_from_proto(report, now)
        self._apply(self.policy.worker_reported(worker, streamed, now))
        if report.worker_id in self.policy.state.membership.workers:
            self.worker_reports[report.worker_id] = report
        self._observe(report.worker_id)
        self._notify_watchers()

    def store_reported(self, report: reports_pb2.StoreReport) -> None:
        """Raises ``StaleEpoch`` when the store obeys a newer scheduler."""
        now = self.clock.now()
        self.epoch.check(report.epoch, now)
        self._apply(self.policy.store_reported(converters.store_from_proto(report, now), now))
        if report.store_id in self.policy.state.membership.stores:
            self.store_reports[report.store_id] = report
        for instance in self.policy.state.instances:
            if instance.host_id == report.host_id:
                self._observe(instance.worker_id)
        self._notify_watchers()

    def _observe(self, worker_id: str) -> None:
        """Keeps what the instance's load tells of itself."""
        state = self.policy.state
        worker, instance = state.membership.workers.get(worker_id), state.instances.on_worker(worker_id)
        if worker is None or instance is None:
            return
        store = state.membership.store_of(instance.host_id)
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

    def retain_failed(self, store_id: str) -> None:
        self._apply(self.policy.retain_failed(store_id, self.clock.now()))

    def tick(self, reports_complete_since: float) -> None:
        self._apply(self.policy.tick(self.clock.now(), reports_complete_since))
        self._forget_lost()

    def _forget_lost(self) -> None:
        membership = self.policy.state.membership
        for worker_id in self.worker_reports.keys() - membership.workers.keys():
            del self.worker_reports[worker_id]
        for store_id in self.store_reports.keys() - membership.stores.keys():
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
            self._record_placement(opened)
        for happening in effects.events:
            if not happening.topic.startswith(transfer_events.EVENT_PREFIX):  # those are the operator's
                self.explain.happened(happening)
            self._event_publisher.note(happening)
            self._copy_metrics.happened(happening)
            self._relay_metrics.happened(happening)
            log.info(happening.kind, model=happening.model, subject=happening.subject, reason=happening.reason)
        self._notify_watchers()

    def _send(self, answer: Answer) -> None:
        event = scheduler_pb2.AdmitEvent()
        if isinstance(answer, Placed):
            ticket = self.cluster_tickets.kv(answer.placement)
            event.placement.CopyFrom(converters.placement_to_proto(answer.placement, ticket))
        elif isinstance(answer, AdmissionRefused):
            event.refusal.key.CopyFrom(converters.key_to_proto(answer.key))
            event.refusal.reason = converters.REFUSAL_REASONS[answer.reason]
            event.refusal.message = answer.message
            event.refusal.retry_after_s = answer.retry_after_s
        else:
            event.waiting.key.CopyFrom(converters.key_to_proto(answer.key))
            event.waiting.queue_position = answer.queue_position
            event.waiting.state = answer.state
            event.waiting.predicted_wait_s = answer.predicted_wait_s
        self._metrics.answered(type(answer).__name__.lower())
        self.streams.send(answer.gateway_id, event)

    def _record_placement(self, opened: AttemptPlaced) -> None:
        self.explain.opened(opened)
        self._metrics.placed(opened.placed_at - opened.admitted_at, opened.placement.cold)
        begin_ns, end_ns = int(opened.admitted_at * 1e9), int(opened.placed_at * 1e9)
        if opened.traceparent:
            request_id = opened.key.request_id
            record_span("scheduler.queue", opened.traceparent, begin_ns, end_ns, request_id=request_id)

    # Watchers of the cluster

    def watch(self) -> asyncio.Event:
        """An event set at every change, for ``unwatch`` to give back."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    def _notify_watchers(self) -> None:
        for event in self._watchers:
            event.set()
