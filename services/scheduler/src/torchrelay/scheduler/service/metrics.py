"""The scheduler's metrics: admissions, answers against their targets, slots, transfers, and the replicator's copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from opentelemetry.metrics import Meter

from torchrelay.common.process.telemetry import observe_counts, observe_value, observe_values, seconds_histogram
from torchrelay.scheduler.policy.effects import AttemptPlaced, SchedulerEvent
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.relay.transfer_events import EVENT_PREFIX
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Admission, CopyCause, Placement

_COPY_CAUSES = frozenset(cause.value for cause in CopyCause)


class SchedulerMetrics:
    """Counts what it is told, and reads the rest from the state when metrics are collected.

    A request counts once against its targets: when it is refused (then without a class), or when the attempt with its
    first token ends. A request whose caller leaves before the first token does not count. Goodput is the rate of
    ``met``, attainment its share of all.
    """

    def __init__(self, meter: Meter, state: State, num_events_dropped: Callable[[], int]) -> None:
        duration = partial(seconds_histogram, meter)
        value, values = partial(observe_value, meter), partial(observe_values, meter)

        self._wait = duration("torchrelay_scheduler_queue_wait", "From admission to placement.")
        off = "How far the predicted {} was off."
        self._ttft_error = duration("torchrelay_scheduler_ttft_prediction_error", off.format("time to first token"))
        self._tbt_error = duration("torchrelay_scheduler_tbt_prediction_error", off.format("mean time between tokens"))
        relay = "From the first chunk requested to the end, by event."
        self._relay_duration = duration("torchrelay_scheduler_relay_duration", relay)
        self._copy_duration = duration("torchrelay_scheduler_copy_duration", "From the order of a copy to its end.")

        def count(name: str, description: str, labels: str | tuple[str, ...]) -> Counter[Any]:
            counts: Counter[Any] = Counter()
            observe_counts(meter, name, description, labels, counts)
            return counts

        self._num_answers = count("torchrelay_scheduler_admissions", "Answers to admissions, by kind.", "kind")
        results = "Requests by result: met (both targets), late (first token), slow (mean between tokens), refused."
        labels = "model", "service_class", "result"
        self._num_requests = count("torchrelay_scheduler_target_requests", results, labels)
        relays = "Relays started, repaired, slow, finished and failed, by event."
        self._num_relays = count("torchrelay_scheduler_relay_events", relays, "event")
        self._num_copies = count("torchrelay_scheduler_copies_started", "Copies ordered, by cause.", "cause")

        stalls = "Scaling stall: time in which requests waited for a load, since no instance was loaded."
        observe_counts(meter, "torchrelay_scheduler_stall_seconds", stalls, "model", state.stalls.seconds)
        tiers = "Loads by the tier that had the weights: host and peer (their RAM), filling, disk, remote."
        observe_counts(meter, "torchrelay_scheduler_loads", tiers, "tier", state.load_times.num_begun)
        waiting = "Requests waiting for a placement, by model."
        values("torchrelay_scheduler_requests_waiting", waiting, ("model",), lambda: _num_waiting(state))
        instances = "Instances by model, phase (loading, ready, draining) and roles."
        phases = "model", "phase", "roles"
        values("torchrelay_scheduler_instances", instances, phases, lambda: _num_instances(state))
        slots = "Slots by devices of a slot, and kind: all (have), with an instance (used), by the target (want)."
        values("torchrelay_scheduler_pool_slots", slots, ("num_devices", "kind"), lambda: _num_slots(state))
        transfers, copies = state.transfers, state.copies
        value("torchrelay_scheduler_relays_running", "Relays planned or running.", lambda: transfers.num_running)
        short, running = "Recently used packs that lack copies in RAM.", "Copies ordered and not complete."
        value("torchrelay_scheduler_packs_under_replicated", short, lambda: copies.num_short)
        value("torchrelay_scheduler_copies_running", running, lambda: len(transfers.ordered))
        value("torchrelay_scheduler_events_dropped", "History events dropped.", num_events_dropped, rises=True)

    def answered(self, kind: str) -> None:
        self._num_answers[kind] += 1

    def placed(self, placed: AttemptPlaced) -> None:
        wait_s = placed.placed_at - placed.admitted_at
        self._wait.record(wait_s, {"model": placed.model, "cold": placed.placement.cold})

    def ended(self, admission: Admission, placement: Placement, outcome: Outcome, ttft_s: float) -> None:
        """The end of an attempt. ``ttft_s``: from the request's admission on; 0: without a token."""
        cold, predicted = {"cold": placement.cold}, placement.predicted  # cold: its instance was still loading
        if outcome.ttft_s is not None and predicted.ttft_s:
            self._ttft_error.record(abs(outcome.ttft_s - predicted.ttft_s), cold)
        if outcome.tbt_s is not None and predicted.tbt_s:
            self._tbt_error.record(abs(outcome.tbt_s - predicted.tbt_s), cold)
        if ttft_s and not admission.num_forced_tokens:
            is_slow = outcome.tbt_s is not None and outcome.tbt_s > admission.tbt_target_s
            result = "late" if ttft_s > admission.ttft_target_s else "slow" if is_slow else "met"
            self._num_requests[admission.model, admission.service_class.name.lower(), result] += 1

    def note(self, event: SchedulerEvent) -> None:
        """Counts refusals, and the events of transfers and copies; ignores others."""
        if event.kind == "refuse":
            self._num_requests[event.model, "", "refused"] += 1
        elif event.topic.startswith(EVENT_PREFIX):
            name = event.topic.removeprefix(EVENT_PREFIX)
            self._num_relays[name] += 1
            if "took_s" in event.fields:
                self._relay_duration.record(float(event.fields["took_s"]), {"event": name})
        elif event.kind in _COPY_CAUSES:
            self._num_copies[event.kind] += 1
        elif event.kind in ("copied", "copy_failed"):
            self._copy_duration.record(float(event.fields["took_s"]), {"failed": event.kind == "copy_failed"})


# An exporter's thread calls these while the event loop changes the state: they copy each collection in one step.


def _num_waiting(state: State) -> dict[tuple[str, ...], int]:
    """Waiting requests by model; 0 for a model that has instances, but no request."""
    num_waiting: Counter[tuple[str, ...]] = Counter({(instance.model,): 0 for instance in list(state.instances)})
    for version_id in state.queues.versions:
        if (model := state.versions.model(version_id)) is not None:
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
    for pool, target in list(state.pool_targets.items()):
        if pool.role is None:
            num_slots[str(pool.num_devices), "want"] = target.num_wanted
    return num_slots
