"""Relays as people see them: a plan, what the reports tell of it, and how long it will yet take."""

from __future__ import annotations

from torchrelay.control.v1.scheduler_pb2 import Feed, RelayView
from torchrelay.scheduler.core import Copy
from torchrelay.scheduler.courses import Course
from torchrelay.scheduler.planning import RunningRelay, measured_bytes_per_s
from torchrelay.scheduler.planning.departures import SLOW_FOR_S
from torchrelay.scheduler.relay_events import mean_bytes_per_s
from torchrelay.scheduler.state import State


def relay_views(state: State, now: float) -> list[RelayView]:
    """Those under way, and for some seconds those that have ended."""
    slow = {(relay.pack_id, relay.target) for relay in state.relays.running() if _is_slow(relay, now)}
    shown = state.courses.shown(now)
    names = {pack_id: state.model_of_pack(pack_id).name for pack_id in {course.pack_id for course in shown}}
    return [_view(course, names[course.pack_id], course.key in slow, now) for course in shown]


def _is_slow(relay: RunningRelay, now: float) -> bool:
    """For a while now; one that was looked into and is still slow has been for longer."""
    return relay.slow_since > 0 and (relay.replanned_at > 0 or now - relay.slow_since >= SLOW_FOR_S)


def _view(course: Course, model: str, is_slow: bool, now: float) -> RelayView:
    copy = course.copy
    view = RelayView(
        pack_id=course.pack_id,
        model=model,
        target=course.target,
        state=_state(course, is_slow),
        urgent=course.urgent,
        feeds=_feeds(course),
        pack_bytes=course.pack_bytes,
        planned_bytes_per_s=course.planned_bytes_per_s,
        running_s=course.running_s(now),
        num_replans=course.num_replans,
        reason=course.reason.text,
        error=course.error,
    )
    if copy is not None:
        view.num_chunks, view.num_chunks_verified = copy.num_chunks, copy.num_chunks_verified
        view.num_repairs = copy.num_repairs
    if course.ended_at:
        view.ended_s, view.bytes_per_s = now - course.ended_at, mean_bytes_per_s(course)
    elif copy is not None:
        view.bytes_per_s = measured_bytes_per_s(copy)
        view.left_s = _missing_bytes(copy) / view.bytes_per_s if view.bytes_per_s else 0.0
    return view


def _state(course: Course, is_slow: bool) -> RelayView.State.ValueType:
    if course.ended_at:
        return RelayView.STATE_FAILED if course.error else RelayView.STATE_FINISHED
    if not course.begun_at:
        return RelayView.STATE_PLANNED
    return RelayView.STATE_SLOW if is_slow else RelayView.STATE_RUNNING


def _feeds(course: Course) -> list[Feed]:
    """By report, and those planned that have not been heard of yet."""
    shares = course.copy.shares if course.copy else ()
    seen = {share.holder_id for share in shares}
    planned = [] if course.ended_at else [Feed(holder_id=source) for source, _ in course.feeds if source not in seen]
    reported = [
        Feed(
            holder_id=share.holder_id,
            num_bytes=share.num_bytes,
            bytes_per_s=share.bytes_per_s,
            following=share.following,
            error=share.error,
        )
        for share in shares
    ]
    return [*reported, *planned]


def _missing_bytes(copy: Copy) -> float:
    return copy.pack_bytes * (1 - copy.num_chunks_verified / copy.num_chunks) if copy.num_chunks else 0.0
