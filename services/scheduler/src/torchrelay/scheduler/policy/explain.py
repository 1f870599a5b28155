"""History of a request and its reasons: bounded timelines and decisions, for ``Explain`` and ``torchrelay explain``.

A timeline is assembled on request: queue and plan from the scheduler's own times, relay and mapping from the reports of
the instances that served the request cold, the rest from what its gateway sent with the release. It shows times of
several hosts side by side, for people to read; only times of the same clock are ever compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torchrelay.common.quantities import format_bytes, format_duration
from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.version_aliases import tenant_of
from torchrelay.scheduler.policy.effects import AttemptPlaced, SchedulerEvent
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.timed_phase import TimedPhase
from torchrelay.scheduler.policy.types import AttemptKey, PackCopy, Placement, SlotStatus

MAX_REQUESTS = 2048
_MAX_PHASES = 64  # per request
_MAX_DECISIONS_PER_MODEL = 100
_MAX_MODELS = 256
_MAX_INSTANCES = 512


def unix_us(at: float) -> int:
    """Unix microseconds of a time of the scheduler's clock."""
    return int(at * 1e6)


@dataclass(slots=True)
class _RequestTimeline:
    model: str = ""
    phases: list[TimedPhase] = field(default_factory=list)
    places: list[AttemptPlaced | SchedulerEvent] = field(default_factory=list)  # formatted only when asked for
    cold_instances: list[str] = field(default_factory=list)
    ended_at: float = math.inf  # infinite: an attempt runs

    def add(self, phases: Iterable[TimedPhase]) -> None:
        self.phases += list(phases)[: max(_MAX_PHASES - len(self.phases), 0)]


@dataclass
class _LoadTimeline:
    created_us: int
    accepted_us: int = 0
    worker_id: str = ""
    earlier_relay_us: int = 0  # begin of an earlier relay that had brought the pack, by its store's clock; 0: none
    relay: TimedPhase | None = None
    load_phases: tuple[TimedPhase, ...] = ()

    def phases(self) -> list[TimedPhase]:
        phases = []
        if self.accepted_us:
            detail = f"load on {self.worker_id}"
            phases.append(TimedPhase("plan", self.created_us, self.accepted_us, "scheduler", detail))
        if self.relay is not None:
            phases.append(self.relay)
        return [*phases, *self.load_phases]


class ExplainLog:
    """Keeps the last ``max_requests`` timelines and the last decisions of each model."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._requests: Recent[str, _RequestTimeline] = Recent(max_requests)
        self._decisions: Recent[str, deque[SchedulerEvent]] = Recent(_MAX_MODELS)
        self._instances: Recent[str, _LoadTimeline] = Recent(_MAX_INSTANCES)

    def note(self, event: SchedulerEvent) -> None:
        """Files the event under each model that it concerns, by that model's name: tenants do not see each other's."""
        for name in dict.fromkeys((event.model, *event.aliases)):
            subject = name if event.subject == event.model else event.subject
            reason = event.by_tenant.get(tenant_of(name), event.reason)
            ring = self._decisions.get(name) or deque(maxlen=_MAX_DECISIONS_PER_MODEL)
            is_own = name == event.model and reason == event.reason
            ring.append(event if is_own else replace(event, model=name, subject=subject, reason=reason))
            self._decisions[name] = ring

    def placed(self, opened: AttemptPlaced) -> None:
        """A request was placed."""
        timeline = self._timeline(opened.key)
        timeline.model, timeline.ended_at = opened.model, math.inf
        where = opened.placement
        if len(timeline.places) < _MAX_PHASES:
            timeline.places.append(opened)
        if where.cold:
            timeline.cold_instances += where.prefill.instance_id, where.decode.instance_id

    def released(self, key: AttemptKey, phases: Sequence[TimedPhase], now: float) -> None:
        """A request ended; ``phases``: from its gateway and workers. The queue is measured here."""
        if phases or key.request_id in self._requests:
            timeline = self._timeline(key)
            timeline.add(phase for phase in phases if phase.name != "queue")
            timeline.ended_at = now

    def record_accuracy(self, key: AttemptKey, placement: Placement, outcome: Outcome, now: float) -> None:
        """Compares what was predicted when the attempt was placed with what was measured."""
        if not outcome.ended_at or not placement.predicted.ttft_s:
            return
        timeline = self._timeline(key)
        if len(timeline.places) < _MAX_PHASES:
            timeline.places.append(_accuracy_event(timeline.model, key, placement, outcome, now))

    def _timeline(self, key: AttemptKey) -> _RequestTimeline:
        timeline = self._requests.get(key.request_id) or _RequestTimeline()
        self._requests[key.request_id] = timeline
        return timeline

    def observe(self, instance: Instance, slot: SlotStatus, store_id: str, copy: PackCopy | None) -> None:
        """Notes how an instance got its weights, from the reports of its worker and its host's store. Called first when
        the load is ordered, so that a relay that was complete by then counts as earlier.
        """
        times = self._instances.get(instance.instance_id)
        if times is None:
            times = _LoadTimeline(unix_us(instance.created_at), worker_id=instance.worker_id)
            if copy is not None and copy.relay_end_us:
                times.earlier_relay_us = copy.relay_begin_us
            self._instances[instance.instance_id] = times
        times.accepted_us = unix_us(instance.accepted_at)
        if slot.instance_id == instance.instance_id and slot.load_phases:
            times.load_phases = slot.load_phases
        if copy is not None:
            times.relay = _relay_phase(copy, store_id, times) or times.relay

    def request(self, request_id: str) -> tuple[list[TimedPhase], list[SchedulerEvent]] | None:
        """The request's phases in order of begin, and the decisions on its model from its admission to its end; None if
        the request is unknown.
        """
        timeline = self._requests.get(request_id)
        if timeline is None:
            return None
        attempts = [place for place in timeline.places if isinstance(place, AttemptPlaced)]
        phases = [*map(_queue_phase, attempts), *timeline.phases][:_MAX_PHASES]
        for instance_id in dict.fromkeys(timeline.cold_instances):
            if times := self._instances.get(instance_id):
                phases += [phase for phase in times.phases() if phase not in phases]
        phases.sort(key=lambda phase: (phase.begin_us, phase.end_us))
        begin = min((attempt.admitted_at for attempt in attempts), default=0.0)
        of_model = self._decisions.get(timeline.model, ())
        decisions = [event for event in of_model if begin <= event.at <= timeline.ended_at]
        places = [placement_event(place) if isinstance(place, AttemptPlaced) else place for place in timeline.places]
        return phases, sorted([*decisions, *places], key=lambda event: event.at)

    def model(self, name: str) -> list[SchedulerEvent]:
        """The model's last decisions, newest last."""
        return list(self._decisions.get(name, ()))


def _queue_phase(opened: AttemptPlaced) -> TimedPhase:
    begin_us, end_us = unix_us(opened.admitted_at), unix_us(opened.placed_at)
    return TimedPhase("queue", begin_us, end_us, "scheduler", f"attempt {opened.key.attempt}")


def placement_event(opened: AttemptPlaced) -> SchedulerEvent:
    """The event that shows a placement."""
    placement = opened.placement
    reason = (
        f"attempt {opened.key.attempt}: prefill on {placement.prefill.worker_id}, decode on "
        f"{placement.decode.worker_id}; first token predicted in {_ms(placement.predicted.ttft_s)}"
        f"{', still loading' if placement.cold else ''}"
    )
    if (source := placement.prompt_source) is not None:
        reason += f"; the layers that {source.worker.worker_id} computes save {_ms(source.saved_s)}"
    reason += f"; {_wanted(opened)}"
    return SchedulerEvent(opened.placed_at, "place", opened.model, opened.key.request_id, reason)


def _wanted(opened: AttemptPlaced) -> str:
    between = f"{format_duration(opened.tbt_target_s)} between tokens"
    if not opened.ttft_target_s:
        return f"target: {between}"
    first = f"the first token within {format_duration(opened.ttft_target_s)} of its arrival"
    return f"targets ({opened.service_class.name.lower()}): {first}, {between}"


def _accuracy_event(model: str, key: AttemptKey, placement: Placement, outcome: Outcome, now: float) -> SchedulerEvent:
    times = [
        ("first token", placement.predicted.ttft_s, outcome.ttft_s),
        ("between tokens", placement.predicted.tbt_s, outcome.tbt_s),
    ]
    parts = [
        f"{name} predicted {_ms(predicted_s)}, measured {_ms(measured_s)}"
        for name, predicted_s, measured_s in times
        if measured_s is not None
    ]
    cached = placement.predicted.num_cached_tokens
    reason = f"attempt {key.attempt}: {'; '.join(parts)}{f'; {cached} tokens expected in the cache' if cached else ''}"
    return SchedulerEvent(now, "predict", model, key.request_id, reason)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def _relay_phase(copy: PackCopy, store_id: str, times: _LoadTimeline) -> TimedPhase | None:
    """The relay that brought the pack for an instance; without duration if the copy was complete before."""
    if not copy.relay_begin_us:
        return None
    if copy.relay_begin_us == times.earlier_relay_us:
        at = times.accepted_us or times.created_us
        return TimedPhase("relay", at, at, store_id, "host copy present, nothing to transfer")
    first_ms = max(copy.relay_first_us - copy.relay_begin_us, 0) / 1e3
    detail = f"{format_bytes(copy.pack_bytes)} from {copy.source or 'unknown'}, first chunk after {first_ms:.1f} ms"
    return TimedPhase("relay", copy.relay_begin_us, copy.relay_end_us, store_id, detail)
