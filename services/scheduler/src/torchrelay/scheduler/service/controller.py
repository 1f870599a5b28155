"""Feeds inputs to the policy and carries out their effects. Nothing here blocks or awaits.

Everything runs on the event loop's thread, one input at a time, so the policy needs no lock.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from opentelemetry import metrics

from torchrelay.common.errors import NotFound
from torchrelay.common.process.telemetry import get_logger, record_span
from torchrelay.common.recent import Recent
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.control.v1.reports_pb2 import StoreReport, WorkerReport
from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.explain import ExplainLog
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.prediction import outcome_of
from torchrelay.scheduler.policy.relay import transfer_events
from torchrelay.scheduler.policy.types import Model, Peer, StoreStatus, WorkerStatus
from torchrelay.scheduler.service import converters
from torchrelay.scheduler.service.admit_streams import AdmitStreams, EventFields
from torchrelay.scheduler.service.epoch import Epoch
from torchrelay.scheduler.service.history import EventPublisher
from torchrelay.scheduler.service.input_log import InputRecorder
from torchrelay.scheduler.service.metrics import SchedulerMetrics
from torchrelay.scheduler.service.tickets import ClusterTickets

log = get_logger(__name__)

_MAX_VERSIONS = 8192
_LOOP_STALL_S = 1.0  # an event loop that stalled this long may have reports unread
_TIMER_S = 1e-3  # uvloop rounds the times of timers

Report: TypeAlias = WorkerReport | StoreReport
CallContext: TypeAlias = Any  # a grpc.aio.ServicerContext, whose stub does not take plain callbacks


class Clock:
    """Seconds since the Unix epoch that never go back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset_s + time.monotonic()


def drop_command(command: effects.Command) -> None:
    """Carries no command out."""


class Controller:
    """Owner of the policy in the service."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        streams: AdmitStreams,
        cluster_tickets: ClusterTickets,
        event_publisher: EventPublisher,
        recorder: InputRecorder | None = None,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.epoch = Epoch(clock.now())
        self.streams = streams
        self.cluster_tickets = cluster_tickets
        self.explain = ExplainLog()
        self.start_command: Callable[[effects.Command], None] = drop_command  # until the service runs, and when it ends
        self.reports: dict[Peer, Report] = {}  # the last report of each worker and store that is present
        self._streamed: dict[Peer, Report] = {}  # the last report by a stream, until one comes by the broker
        self._recorder = recorder
        self._due_at = math.inf  # for which the timer runs
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = asyncio.Event()
        self._versions: Recent[str, tuple[types_pb2.ModelVersion, Model]] = Recent(_MAX_VERSIONS)
        self._with_minimum: dict[str, types_pb2.ModelVersion] = {}  # these are loaded without an admission
        self._event_publisher = event_publisher
        self._watchers: set[asyncio.Event] = set()
        self._pool_watchers: set[asyncio.Event] = set()
        self._pools_seen_at: float | None = None  # when the pools were evaluated that watchers know
        meter = metrics.get_meter("torchrelay.scheduler")
        self._metrics = SchedulerMetrics(meter, policy.state, lambda: event_publisher.num_dropped)

    def apply(self, input_: inputs.Input, now: float | None = None) -> None:
        """Applies the input, at ``now`` if its time is known already, and carries out the effects."""
        now = self.clock.now() if now is None else now
        if self._recorder is not None:
            self._recorder.record(input_, now)
        self._carry_out(self.policy.apply(input_, now))
        if self.policy.state.pools_evaluated_at != self._pools_seen_at:
            self._pools_seen_at = self.policy.state.pools_evaluated_at
            for event in self._pool_watchers:
                event.set()
        self._set_timer()

    def _set_timer(self) -> None:
        """Lets ``run`` tick at the next due time."""
        if (due := self.policy.next_due()) >= self._due_at:
            return
        self._stop_timer()
        self._due_at = due
        if (delay_s := due - self.clock.now()) <= 0:
            self._is_due.set()
        else:
            self._timer = asyncio.get_running_loop().call_later(delay_s + _TIMER_S / 2, self._is_due.set)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def run(self) -> NoReturn:
        """Ticks at all due times, until cancelled. While the event loop stalls, silence means nothing."""
        ticked_at = listening_since = self.clock.now()
        self._set_timer()
        try:
            while True:
                await self._is_due.wait()
                self._is_due.clear()
                self._due_at = math.inf
                now = self.clock.now()
                if now - ticked_at > _LOOP_STALL_S:
                    listening_since = now
                ticked_at = now
                self.apply(inputs.Tick(listening_since), now)
                await asyncio.sleep(0)  # more may be due at once: messages that have come are handled in between
                self._forget_lost_peers()
        finally:
            self._stop_timer()

    def _forget_lost_peers(self) -> None:
        membership = self.policy.state.membership
        workers, stores = membership.workers, membership.stores
        if len(self.reports) > len(workers) + len(stores):
            for peer in [peer for peer in self.reports if not self.is_present(peer)]:
                del self.reports[peer]
                self._streamed.pop(peer, None)
        self.epoch.keep(lambda node_id: node_id in workers or node_id in stores)

    # Inputs that concern more than the policy

    def admit(self, gateway_id: str, request: scheduler_pb2.AdmitRequest) -> None:
        now = self.clock.now()
        admission = converters.admission_from_proto(request, gateway_id, now)
        current = None
        if request.HasField("current"):
            current = converters.placement_from_proto(request.current, admission.key)
        model = self._note_version(request.version)
        self.apply(inputs.Admit(admission, model, current, request.is_computed), now)

    def _note_version(self, version: types_pb2.ModelVersion) -> Model:
        """The model of a version. Most requests name a version exactly as the last request did, so it is cached."""
        known = self._versions.get(version.version_id)
        if known is None or known[0] != version:
            known = version, converters.model_from_proto(version)
        self._versions[version.version_id] = known
        return known[1]

    def set_minimums(self, minimums: scheduler_pb2.Minimums) -> None:
        self._with_minimum = {version.version_id: version for version in minimums.versions}
        self.apply(inputs.MinimumsSet(tuple(map(self._note_version, minimums.versions))))

    def release(self, release: scheduler_pb2.Release) -> None:
        key = converters.key_from_proto(release.key)
        phases = converters.phases_from_proto(release.phases)
        now = self.clock.now()
        self.explain.released(key, phases, now)
        attempt = self.policy.state.attempts.get(key)
        outcome = None
        if attempt is not None:
            outcome = outcome_of(phases, release.num_output_tokens, attempt.admission.num_choices)
            self.explain.record_accuracy(key, attempt.placement, outcome, now)
            self._metrics.ended(attempt.admission, attempt.placement, outcome, release.ttft_s)
        self.apply(inputs.Release(key, release.ttft_s > 0, outcome, release.is_recalled, release.goes_on), now)

    def is_present(self, peer: Peer) -> bool:
        return self.status(peer) is not None

    def is_accepted(self, report: Report) -> bool:
        """Whether its process is the present one of its node."""
        status = self.status(converters.peer_of(report))
        return status is not None and status.incarnation == report.incarnation

    def status(self, peer: Peer) -> WorkerStatus | StoreStatus | None:
        membership = self.policy.state.membership
        return membership.stores.get(peer.node_id) if peer.is_store else membership.workers.get(peer.node_id)

    def reported(self, report: Report, streamed: bool) -> None:
        """Raises ``StaleEpoch`` when most peers, and the one that reports among them, obey a newer scheduler."""
        now, peer = self.clock.now(), converters.peer_of(report)
        membership = self.policy.state.membership
        num_peers = len(membership.workers) + len(membership.stores) + (not self.is_present(peer))
        self.epoch.check(report.epoch, peer.node_id, num_peers, now)
        if report.is_beat:
            self.apply(converters.beat_from_proto(report), now)
            return
        if streamed:
            self._streamed[peer] = report
        elif report == self._streamed.pop(peer, None) and self.repeated(peer):
            return
        if isinstance(report, WorkerReport):
            self.apply(inputs.WorkerReported(converters.worker_from_proto(report, now), streamed), now)
        else:
            self.apply(inputs.StoreReported(converters.store_from_proto(report, now), streamed), now)
            report.ClearField("disk")  # the policy has it; a view of many stores would grow too large
        if self.is_accepted(report):
            self.reports[peer] = report
        for instance in self._instances_of(report):
            self._explain_load(instance.worker_id)
        self._notify_watchers()

    def repeated(self, peer: Peer) -> bool:
        """Handles a repeat of the peer's last report as a heartbeat. False if the report must be applied whole: because
        it is not known, a copy is on its way to the store, or an instance of the worker or host is about to change.
        """
        report = self.reports.get(peer)
        if report is None or self.policy.state.transfers.into(peer.node_id):
            return False
        if not all(instance.is_settled for instance in self._instances_of(report)):
            return False
        self.apply(converters.beat_from_proto(report))
        return True

    def _instances_of(self, report: Report) -> Sequence[Instance]:
        """Instances of the worker that reports, or of the store's host."""
        instances = self.policy.state.instances
        if isinstance(report, WorkerReport):
            instance = instances.on_worker(report.worker_id)
            return () if instance is None else (instance,)
        return tuple(instances.on_host(report.host_id))

    def _explain_load(self, worker_id: str) -> None:
        """Passes on what the reports say about the load of the worker's instance."""
        state = self.policy.state
        worker, instance = state.membership.workers.get(worker_id), state.instances.on_worker(worker_id)
        if worker is None or instance is None:
            return
        store = state.membership.store_of(instance.host_id)
        copy = store.copies.get(instance.pack_id) if store else None
        self.explain.observe(instance, worker.slot, store.store_id if store else "", copy)

    def version(self, version_id: str) -> types_pb2.ModelVersion:
        """The version as named by its last admission, or by the message that set its minimum.

        Raises ``NotFound`` if both were forgotten, since there are too many versions.
        """
        if (known := self._versions.get(version_id)) is not None:
            return known[0]
        if (named := self._with_minimum.get(version_id)) is not None:
            return named
        raise NotFound(f"version {version_id} is not remembered any more")

    # Effects

    def _carry_out(self, done: effects.Effects) -> None:
        if not done:
            return
        for command in done.commands:
            if isinstance(command, effects.LoadCommand):
                for order in (order for hop in command.hops for order in hop.loads):
                    self._explain_load(order.worker_id)
            self.start_command(command)
        for answer in done.answers:
            self._send(answer)
        for notice in done.notices:
            self.streams.send(notice.gateway_id, {"loading": converters.to_message(scheduler_pb2.Loading, notice)})
        for placed in done.opened:
            self._record_placement(placed)
        for event in done.events:
            if not event.topic.startswith(transfer_events.EVENT_PREFIX):  # transfer events are for operators only
                self.explain.note(event)
            self._event_publisher.note(event)
            self._metrics.note(event)
            log.info(event.kind, model=event.model, subject=event.subject, reason=event.reason)
        self._notify_watchers()

    def _send(self, answer: effects.Answer) -> None:
        event: EventFields
        match answer:
            case effects.Placed(placement=placement):
                kind, event = "placed", self.cluster_tickets.placed(placement)
            case effects.AdmissionRefused(key=key, reason=reason):
                fields = {"key": key._asdict(), "reason": reason}
                kind, event = "refused", {"refusal": converters.to_message(scheduler_pb2.Refusal, answer, **fields)}
            case effects.Recall(key=key, keeps_prompt=keeps_prompt):
                kind, event = "recalled", {"recall": {"key": key._asdict(), "keeps_prompt": keeps_prompt}}
        self._metrics.answered(kind)
        self.streams.send(answer.gateway_id, event)

    def _record_placement(self, placed: effects.AttemptPlaced) -> None:
        self.explain.placed(placed)
        self._metrics.placed(placed)
        if placed.traceparent:
            begin_ns, end_ns = int(placed.admitted_at * 1e9), int(placed.placed_at * 1e9)
            record_span("scheduler.queue", placed.traceparent, begin_ns, end_ns, request_id=placed.key.request_id)

    # Watchers of the cluster

    def watch(self, call: CallContext | None = None, *, only_pools: bool = False) -> asyncio.Event:
        """An event that is set at every change, or whenever targets of pools were evaluated, until the call ends."""
        event, watchers = asyncio.Event(), self._pool_watchers if only_pools else self._watchers
        watchers.add(event)
        if call is not None:
            # A broken stream may leave the call's generator suspended: this must not wait until it is collected.
            call.add_done_callback(lambda _: watchers.discard(event))
        return event

    def _notify_watchers(self) -> None:
        for event in self._watchers:
            event.set()
