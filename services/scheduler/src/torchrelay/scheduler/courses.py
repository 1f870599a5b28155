"""Each relay from its plan to its end, as plans and the stores' reports tell of it: for people to see. Pure.

    planned --first chunk asked for--> running --last chunk verified--> finished
       `--refused, or never begun--> failed <--error, dropped, store gone--'

A relay is known by its pack and its target. When it began, by the target's clock, tells a run from an earlier one,
whose record stands in the reports until the next has begun. What somebody else ordered is known from the reports alone.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torchrelay.scheduler.core import Copy, Store
from torchrelay.scheduler.reasons import Reason

SHOWN_S = 6.0  # how long one that has ended is shown
UNSEEN_S = 10.0  # one whose store does not begin it within this time has failed
_MAX_ENDED = 64

Key = tuple[str, str]  # pack, target


class Turn(enum.Enum):
    """What the reports tell of a relay; the values are the history's, which also knows slow ones."""

    BEGUN = "begun"
    REPAIRED = "repaired"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class Course:
    """One store's incoming copy. Times are the scheduler's, 0: not yet."""

    pack_id: str
    target: str
    pack_bytes: int
    drawn_at: float
    feeds: tuple[tuple[str, float], ...] = ()  # sources with their rates, as planned; empty: the plan is not known
    planned_bytes_per_s: float = 0.0  # 0: nothing was predicted
    urgent: bool = True
    reason: Reason = field(default_factory=Reason)
    stale_begin_us: int = 0  # of an earlier run
    num_replans: int = 0
    begun_at: float = 0.0
    copy: Copy | None = None  # as last reported
    told: Copy | None = None  # as it was when repairs were last told
    ended_at: float = 0.0
    error: str = ""

    @property
    def key(self) -> Key:
        return self.pack_id, self.target

    def running_s(self, now: float) -> float:
        """Since it began; of one that has finished what its store measured."""
        if self.copy is not None and self.copy.relay_end_us:
            return (self.copy.relay_end_us - self.copy.relay_begin_us) / 1e6
        return (self.ended_at or now) - self.begun_at if self.begun_at else 0.0

    @property
    def num_bytes_brought(self) -> int:
        """By this run: what an earlier one brought is not fetched again."""
        if self.copy is None:
            return 0
        return sum(share.num_bytes for share in self.copy.shares) or (self.pack_bytes if self.copy.complete else 0)


@dataclass(frozen=True)
class Told:
    """A turn of a relay; ``before``: the copy as it was when this was last told."""

    turn: Turn
    course: Course
    before: Copy | None = None


class Courses:
    """Owned by the state."""

    def __init__(self) -> None:
        self._running: dict[Key, Course] = {}
        self._ended: deque[Course] = deque(maxlen=_MAX_ENDED)

    def drawn(self, course: Course) -> None:
        """It was planned."""
        self._running[course.key] = course

    def hasten(self, key: Key) -> None:
        """Somebody waits for it by now."""
        if course := self._running.get(key):
            self._running[key] = replace(course, urgent=True)

    def redrawn(self, key: Key, feeds: tuple[tuple[str, float], ...], bytes_per_s: float) -> None:
        """It goes on with other sources."""
        if course := self._running.get(key):
            changed = replace(course, feeds=feeds, planned_bytes_per_s=bytes_per_s)
            self._running[key] = replace(changed, num_replans=course.num_replans + 1)

    @property
    def num_running(self) -> int:
        """Planned and running."""
        return len(self._running)

    def get(self, key: Key) -> Course | None:
        return self._running.get(key)

    def shown(self, now: float) -> list[Course]:
        """Those under way and those that ended of late, of each pack and target the last, in the order drawn."""
        ended = {course.key: course for course in self._ended if now - course.ended_at < SHOWN_S}
        return sorted((ended | self._running).values(), key=lambda course: course.drawn_at)

    def observe(self, store: Store, before: Store | None, now: float) -> list[Told]:
        """What a report tells. ``before``: the store's last one; without it, what runs has been running."""
        told: list[Told] = []
        for copy in store.copies.values():
            key = (copy.pack_id, store.store_id)
            if key not in self._running and (found := _unplanned(copy, store.store_id, before, now)):
                self._running[key] = found
            if course := self._running.get(key):
                told += self._advance(course, copy, now)
        for course in self._into(store.store_id):
            if course.pack_id not in store.copies and course.begun_at:
                told.append(self._end(course, now, "it was dropped"))
            elif not course.begun_at and now - course.drawn_at > UNSEEN_S:
                told.append(self._end(course, now, "its store has not begun it"))
        return told

    def refused(self, key: Key, cause: str, now: float) -> list[Told]:
        """The store could not be told of it, or did not take it; one that runs already goes on."""
        course = self._running.get(key)
        return [self._end(course, now, cause)] if course is not None and not course.begun_at else []

    def lost(self, store_id: str, cause: str, now: float) -> list[Told]:
        """The target is gone, or silent."""
        return [self._end(course, now, cause) for course in self._into(store_id)]

    def _into(self, store_id: str) -> list[Course]:
        return [course for course in self._running.values() if course.target == store_id]

    def _advance(self, course: Course, copy: Copy, now: float) -> Iterator[Told]:
        if not course.begun_at:
            if copy.relay_begin_us in (0, course.stale_begin_us):
                if copy.complete:  # it was there already: nothing flows
                    del self._running[course.key]
                return
            course = replace(course, begun_at=now, copy=copy, pack_bytes=copy.pack_bytes or course.pack_bytes)
            yield Told(Turn.BEGUN, course)
        elif course.copy is not None and copy.relay_begin_us != course.copy.relay_begin_us and not copy.error:
            if copy.relay_begin_us:  # between two reports one run ended and another began
                yield self._end(course, now, "it was begun anew")
                again = replace(course, begun_at=0.0, copy=None, told=None)
                self._running[course.key] = again
                yield from self._advance(again, copy, now)
            return
        before, course = course.told, replace(course, copy=copy)
        is_over = copy.complete or bool(copy.error)
        if copy.num_repairs > (before.num_repairs if before else 0):
            if is_over or _is_mended(before, copy):
                course = replace(course, told=copy)
                yield Told(Turn.REPAIRED, course, before)
        else:
            course = replace(course, told=copy)
        self._running[course.key] = course
        if is_over:
            yield self._end(course, now, copy.error)

    def _end(self, course: Course, now: float, error: str) -> Told:
        self._running.pop(course.key, None)
        ended = replace(course, ended_at=now, error=error)
        self._ended.append(ended)
        return Told(Turn.FAILED if error else Turn.FINISHED, ended)


def _unplanned(copy: Copy, target: str, before: Store | None, now: float) -> Course | None:
    """A relay that no plan of ours began, if the copy shows one: new since the last report, or still receiving."""
    found = Course(copy.pack_id, target, copy.pack_bytes, now)
    if before is None:
        return replace(found, begun_at=now, copy=copy, told=copy) if copy.receiving and copy.relay_begin_us else None
    known = before.copies.get(copy.pack_id)
    is_new = copy.relay_begin_us != (known.relay_begin_us if known else 0)
    return found if is_new and copy.relay_begin_us else None


def _is_mended(before: Copy | None, copy: Copy) -> bool:
    """Whether a repair can be told of whole; else the next source is still being opened."""
    follows = any(share.following for share in copy.shares)
    return bool(joined(before, copy) or (given_up(before, copy) and follows))


def joined(before: Copy | None, copy: Copy) -> tuple[str, ...]:
    """Sources that are followed now, and were not; of a run of which nothing was told yet those that came later."""
    known = {share.holder_id for share in before.shares if share.following} if before else set()
    following = [share.holder_id for share in copy.shares if share.following and share.holder_id not in known]
    return tuple(following if before and before.shares else following[1:])


def given_up(before: Copy | None, copy: Copy) -> Mapping[str, str]:
    """Why, by source."""
    known = {share.holder_id: share.error for share in before.shares} if before else {}
    return {
        share.holder_id: share.error
        for share in copy.shares
        if share.error and known.get(share.holder_id, "") != share.error
    }
