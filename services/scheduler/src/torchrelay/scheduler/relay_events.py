"""The turns of relays in words: one happening each, for the history (``relay.event.relay.*``), metrics and the log.

Not for Explain, which tenants read: several of them may have uploaded the model whose pack it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.common.counts import counted
from torchrelay.scheduler.core import Copy, Model
from torchrelay.scheduler.courses import Course, Told, Turn, given_up, joined
from torchrelay.scheduler.effects import Happening
from torchrelay.scheduler.planning import Arrow, RunningRelay
from torchrelay.scheduler.reasons import lasting

EVENTS = "relay."  # what the names of all of them begin with
Fields = dict[str, str | int | float]


def happening(told: Told, model: Model, now: float) -> Happening:
    """``kind`` and event bear the turn's name, the subject is the target."""
    course = told.course
    fields: Fields = {"pack_id": course.pack_id, "store_id": course.target, "pack_bytes": course.pack_bytes}
    brought: Mapping[str, int] = {}
    match told.turn:
        case Turn.BEGUN:
            reason = _begun(course)
            urgency = "urgent" if course.urgent else "idle"
            fields |= {"sources": ",".join(sources_of(course)), "urgency": urgency} | course.reason.fields
            fields["planned_bytes_per_s"] = course.planned_bytes_per_s
        case Turn.REPAIRED:
            reason = _repaired(course, told.before)
            fields |= _repair_fields(course.copy, told.before)
        case Turn.FINISHED | Turn.FAILED:
            reason = _finished(course) if told.turn is Turn.FINISHED else _failed(course)
            fields |= _end_fields(course)
            brought = {share.holder_id: share.num_bytes for share in course.copy.shares} if course.copy else {}
    kind = f"relay_{told.turn.value}"
    return Happening(now, kind, model.name, course.target, reason, f"{EVENTS}{told.turn.value}", fields, brought)


def slow(relay: RunningRelay, measured: float, arrow: Arrow | None, model: Model, now: float) -> Happening:
    """A relay has departed from its plan for a while. ``arrow``: what it does now; None: nothing better is known."""
    due = _mega(relay.bytes_per_s)
    planned = f"{relay.target} gets {_mega(measured)} MB/s instead of the {due} planned from {relay.upstream}"
    fields: Fields = {
        "pack_id": relay.pack_id,
        "store_id": relay.target,
        "bytes_per_s": measured,
        "planned_bytes_per_s": relay.bytes_per_s,
        "sources": ",".join(source for source, _ in relay.feeds),
        "new_sources": ",".join(arrow.striped) if arrow else "",
    }
    fields["cause"] = "replanned" if arrow else "no_better_source"
    reason = f"{planned}; re-planned: {arrow}" if arrow else f"{planned}; no better source is known"
    return Happening(
        now, "reroute" if arrow else "relay_slow", model.name, relay.target, reason, f"{EVENTS}slow", fields
    )


def sources_of(course: Course) -> tuple[str, ...]:
    """Whom the target follows, as reported, or else as planned."""
    following = [share.holder_id for share in course.copy.shares if share.following] if course.copy else []
    planned = [source for source, _ in course.feeds]
    return tuple(following or planned or ([course.copy.source] if course.copy and course.copy.source else []))


def _begun(course: Course) -> str:
    planned = [source for source, _ in course.feeds]  # what is followed first may be a part of it
    arrow = f"{' + '.join(planned or sources_of(course)) or '?'} -> {course.target}"
    text = f"{arrow}, {'urgent' if course.urgent else 'idle'}, {_mega(course.pack_bytes)} MB"
    return f"{text}: {course.reason.text}" if course.reason.text else text


def _repaired(course: Course, before: Copy | None) -> str:
    copy = course.copy
    assert copy is not None  # a report told of the repair
    new, lost = joined(before, copy), given_up(before, copy)
    whence = f"{course.target} goes on from {' and '.join(new)}" if new else f"{course.target} goes on"
    if lost:
        return f"{whence}; given up: " + ", ".join(f"{source} ({why})" for source, why in lost.items())
    doubted = _doubted(course, new)
    return f"{whence}, beside {doubted}" if doubted else whence


def _doubted(course: Course, new: tuple[str, ...]) -> str:
    """The source that another was joined for: of those asked before the one that lags most behind its plan."""
    planned = dict(course.feeds)
    asked = [share for share in course.copy.shares if share.following and share.holder_id not in new]  # type: ignore[union-attr]
    if not asked:
        return ""
    share = min(asked, key=lambda share: share.bytes_per_s / (planned.get(share.holder_id) or 1.0))
    rate = f"{share.holder_id}, which brings {_mega(share.bytes_per_s)} MB/s"
    due = planned.get(share.holder_id, 0.0)
    return f"{rate} of {_mega(due)} planned" if due else rate


def _repair_fields(copy: Copy | None, before: Copy | None) -> Fields:
    assert copy is not None
    return {
        "cause": "given_up" if given_up(before, copy) else "joined",
        "num_repairs": copy.num_repairs,
        "joined": ",".join(joined(before, copy)),
        "given_up": ",".join(given_up(before, copy)),
        "num_chunks_verified": copy.num_chunks_verified,
        "num_chunks": copy.num_chunks,
    }


def _end_fields(course: Course) -> Fields:
    took_s = course.running_s(course.ended_at)
    fields: Fields = {"took_s": took_s, "num_bytes": course.num_bytes_brought, "bytes_per_s": mean_bytes_per_s(course)}
    if course.copy is not None:
        fields["num_repairs"] = course.copy.num_repairs
    if course.error:
        fields["error"] = course.error
    return fields


def mean_bytes_per_s(course: Course) -> float:
    """Over the whole run; 0 where it has none."""
    took_s = course.running_s(course.ended_at)
    return course.num_bytes_brought / took_s if took_s > 0 else 0.0


def _finished(course: Course) -> str:
    took_s = course.running_s(course.ended_at)
    moved = f"{_mega(course.num_bytes_brought)} MB in {lasting(took_s)}, {_mega(mean_bytes_per_s(course))} MB/s"
    return f"{_arrow_with_shares(course)}: {moved}{_repairs(course)}"


def _arrow_with_shares(course: Course) -> str:
    shares = [share for share in course.copy.shares if share.num_bytes] if course.copy else []
    if len(shares) < 2:
        return f"{shares[0].holder_id if shares else ' + '.join(sources_of(course)) or '?'} -> {course.target}"
    total = sum(share.num_bytes for share in shares)
    parts = [f"{share.holder_id} {_part(share.num_bytes / total)}" for share in shares]
    return f"{' + '.join(parts)} -> {course.target}"


def _part(share: float) -> str:
    return "<1%" if share < 0.01 else f"{share:.0%}"


def _repairs(course: Course) -> str:
    num = course.copy.num_repairs if course.copy else 0
    return f", {counted(num, 'repair')}" if num else ""


def _failed(course: Course) -> str:
    copy = course.copy
    progress = (
        f" with {copy.num_chunks_verified} of {counted(copy.num_chunks, 'chunk')}" if copy and copy.num_chunks else ""
    )
    return f"{course.target} ended{progress}: {course.error}{_repairs(course)}"


def _mega(value: float) -> str:
    """Millions, with three significant digits and never an exponent."""
    return f"{value / 1e6:.0f}" if value >= 99.5e6 else f"{value / 1e6:.3g}"
