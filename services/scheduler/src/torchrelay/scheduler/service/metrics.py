"""The scheduler's metrics: admissions, answers against their targets, slots, transfers, and the replicator's copies.

Functions given to them are called when metrics are collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from opentelemetry.metrics import Meter

from torchrelay.common.process.telemetry import observe_counts, observe_value, observe_values, seconds_histogram
from torchrelay.scheduler.policy.effects import AttemptPlaced, SchedulerEvent
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.relay.transfer_events import EVENT_PREFIX
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Admission, CopyCause, Placement

_CAUSES = frozenset(cause.value for cause in CopyCause)


class AdmissionMetrics:
    """Admissions, waiting requests, and the errors of predictions. ``num_dropped``: events of the history."""

    def __init__(self, meter: Meter, state: State, num_dropped: Callable[[], int]) -> None:
        self._wait = seconds_histogram(meter, "torchrelay_scheduler_queue_wait", "From admission to placement.")
        ttft, tbt = "torchrelay_scheduler_ttft_prediction_error", "torchrelay_scheduler_tbt_prediction_error"
        self._ttft_error = seconds_histogram(meter, ttft, "How far the predicted time to first token was off.")
        self._tbt_error = seconds_histogram(meter, tbt, "How far the predicted mean time between tokens was off.")
        self._num_answers: Counter[str] = Counter()  # by kind
        answers = "Answers to admissions, by kind."
        observe_counts(meter, "torchrelay_scheduler_admissions", answers, "kind", self._num_answers)
        waiting, dropped = "Requests waiting for a placement, by model.", "History events dropped."
        observe_values(meter, "torchrelay_scheduler_requests_waiting", waiting, ("model",), lambda: _num_waiting(state))
        observe_value(meter, "torchrelay_scheduler_events_dropped", dropped, num_dropped, rises=True)

    def placed(self, placed: AttemptPlaced) -> None:
        wait_s = placed.placed_at - placed.admitted_at
        self._wait.record(wait_s, {"model": placed.model, "cold": placed.placement.cold})

    def answered(self, kind: str) -> None:
        self._num_answers[kind] += 1

    def record_accuracy(self, placement: Placement, outcome: Outcome) -> None:
        """Prediction errors of an attempt; ``cold``: it was placed on an instance that was still loading."""
        cold = {"cold": placement.cold}
        if outcome.ttft_s is not None and placement.predicted.ttft_s:
            self._ttft_error.record(abs(outcome.ttft_s - placement.predicted.ttft_s), cold)
        if outcome.tbt_s is not None and placement.predicted.tbt_s:
            self._tbt_error.record(abs(outcome.tbt_s - placement.predicted.tbt_s), cold)


class TargetMetrics:
    """Requests against their latency targets. Goodput is the rate of ``met``, attainment its share of all.

    A request counts once: when it is refused (then without a class), or when the attempt with its first token ends.
    A request whose caller leaves before the first token does not count.
    """

    def __init__(self, meter: Meter) -> None:
        self._num_requests: Counter[tuple[str, str, str]] = Counter()  # by model, class and result
        results = "Requests by result: met (both targets), late (first token), slow (mean between tokens), refused."
        labels = "model", "service_class", "result"
        observe_counts(meter, "torchrelay_scheduler_target_requests", results, labels, self._num_requests)

    def ended(self, admission: Admission, ttft_s: float, tbt_s: float | None) -> None:
        """``ttft_s``: from the admission on; 0: without a token. ``tbt_s``: None for an answer of one token."""
        if not ttft_s or admission.num_forced_tokens:
            return
        is_slow = tbt_s is not None and tbt_s > admission.tbt_target_s
        result = "late" if ttft_s > admission.ttft_target_s else "slow" if is_slow else "met"
        self._num_requests[admission.model, admission.service_class.name.lower(), result] += 1

    def note(self, event: SchedulerEvent) -> None:
        """Counts a refusal; ignores other events."""
        if event.kind == "refuse":
            self._num_requests[event.model, "", "refused"] += 1


class SlotMetrics:
    """Instances by model, and the slots of each pool."""

    def __init__(self, meter: Meter, state: State) -> None:
        instances = "Instances by model, phase (loading, ready, draining) and roles."
        labels = "model", "phase", "roles"
        observe_values(meter, "torchrelay_scheduler_instances", instances, labels, lambda: _num_instances(state))
        slots = "Slots by devices of a slot, and kind: all (have), with an instance (used), by the target (want)."
        labels_of_pool = "num_devices", "kind"
        observe_values(meter, "torchrelay_scheduler_pool_slots", slots, labels_of_pool, lambda: _num_slots(state))


# An exporter's thread calls these while the event loop changes the state: they copy each collection in one step.


def _num_waiting(state: State) -> dict[tuple[str, ...], int]:
    """Waiting requests by model; 0 for a model that has instances, but no request."""
    num_waiting: Counter[tuple[str, ...]] = Counter({(instance.model,): 0 for instance in list(state.instances)})
    for version_id in state.queues.versions:
        if (model := state.models.get(version_id)) is not None:
            num_waiting[model.name,] += state.queues.num_waiting(version_id)
    return num_waiting


def _num_instances(state: State) -> dict[tuple[str, ...], int]:
    return Counter(
        (instance.model, instance.phase.value, "+".join(role.name.lower() for role in sorted(instance.roles)))
        for instance in list(state.instances)
    )


def _num_slots(state: State) -> dict[tuple[str, ...], int]:
    """Slots by devices of a slot and kind."""
    workers = dict(state.membership.workers)
    num_slots: dict[tuple[str, ...], int] = Counter()
    for worker in workers.values():
        num_slots[str(worker.num_devices), "have"] += 1
        num_slots[str(worker.num_devices), "used"] += 0
    for instance in list(state.instances):
        if (of_instance := workers.get(instance.worker_id)) is not None:
            num_slots[str(of_instance.num_devices), "used"] += 1
    for num_devices, target in list(state.pool_targets.items()):
        num_slots[str(num_devices), "want"] = target.num_wanted
    return num_slots


class RelayMetrics:
    """Transfers, whoever ordered them. ``num_running``: planned or running."""

    def __init__(self, meter: Meter, num_running: Callable[[], int]) -> None:
        self._num_events: Counter[str] = Counter()  # by event
        events = "Relays started, repaired, slow, finished and failed, by event."
        observe_counts(meter, "torchrelay_scheduler_relay_events", events, "event", self._num_events)
        duration = "From the first chunk requested to the end, by event."
        self._duration = seconds_histogram(meter, "torchrelay_scheduler_relay_duration", duration)
        observe_value(meter, "torchrelay_scheduler_relays_running", "Relays planned or running.", num_running)

    def note(self, event: SchedulerEvent) -> None:
        """Counts a transfer's event; ignores others."""
        if not event.topic.startswith(EVENT_PREFIX):
            return
        name = event.topic.removeprefix(EVENT_PREFIX)
        self._num_events[name] += 1
        if "took_s" in event.fields:
            self._duration.record(float(event.fields["took_s"]), {"event": name})


class ReplicationMetrics:
    """The replicator's copies. ``num_short``: recently used packs that lack copies; ``num_running``: copies."""

    def __init__(self, meter: Meter, num_short: Callable[[], int], num_running: Callable[[], int]) -> None:
        self._num_started: Counter[str] = Counter()  # by cause
        started = "Copies ordered, by cause."
        observe_counts(meter, "torchrelay_scheduler_copies_started", started, "cause", self._num_started)
        duration = "From the order of a copy to its end."
        self._duration = seconds_histogram(meter, "torchrelay_scheduler_copy_duration", duration)
        short, running = "Recently used packs that lack copies in RAM.", "Copies ordered and not complete."
        observe_value(meter, "torchrelay_scheduler_packs_under_replicated", short, num_short)
        observe_value(meter, "torchrelay_scheduler_copies_running", running, num_running)

    def note(self, event: SchedulerEvent) -> None:
        """Counts a copy's event; ignores others."""
        if event.kind in _CAUSES:
            self._num_started[event.kind] += 1
        elif event.kind in ("copied", "copy_failed"):
            self._duration.record(float(event.fields["took_s"]), {"failed": event.kind == "copy_failed"})
