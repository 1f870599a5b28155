"""Which source is asked for which chunk, and when another is joined: the decisions of ``follow``, pure; time is given.

Chunks are handed out in the order wanted, a window of them to each source, as large as what it brings in a twentieth
of a second. Nothing that was accepted is asked for again.

A source is in doubt when it has a chunk asked of it and brings nothing (silent), or much less than before (slow), when
it says for too long that it has none (starved), or does not open. For each in doubt one more is joined, as soon as it
is: the doubted one is kept, and may recover; then the other rests, connected. What was asked of a silent source is
asked of others too, and whoever brings it first wins; of a slow one it is taken back, but for a chunk or two. Towards
the end an idle source takes over what it will bring sooner than the one that was asked.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torchrelay.transfer.lanes import Lane, Phase

MAX_STRIKES = 2  # failures in a row, with no chunk between them, that a source is allowed
WINDOW_S = 0.05
MIN_WINDOW, FIRST_WINDOW, MAX_WINDOW = 2, 4, 64
UNMEASURED_WINDOW_BYTES = 2 << 20
PATIENCE_S = 0.5  # how long a source may have nothing: those above it are repairing
SETTLED_S = 0.3  # a source that was in doubt has to be sound for so long before others rest
FALLEN_BELOW = 0.75  # a source that turned slow is of no concern while all together bring so much of what they did
STEAL_FACTOR, STEAL_S = 1.25, 0.01  # an idle source takes a chunk over when it is sooner by this
LOOK_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Rules:
    """``num_striped`` sources are followed at once; ``hedge_slow``: a slow one is a reason to join another."""

    num_striped: int = 1
    hedge_slow: bool = True
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, slots=True)
class Orders:
    """What to tell one source: places to ask for, places no longer wanted of it."""

    wanted: list[int]
    cancelled: list[int]


class Swarm:
    """The state of one transfer of ``num_places`` chunks from up to ``num_sources`` sources, by their numbers."""

    def __init__(self, num_places: int, num_sources: int, rules: Rules) -> None:
        self.lanes = [Lane() for _ in range(num_sources)]
        self.num_left = num_places
        self.num_repairs = 0  # given up, or joined because another was in doubt
        self.stirred = False  # chunks have become free, or there is something to cancel
        self.progress_at = 0.0
        self._rules = rules
        self._num_places = num_places
        self._done = bytearray(num_places)
        self._writer: dict[int, int] = {}  # into whose hands a chunk is coming
        self._free = list(range(num_places))  # a heap; may name what is not free any more
        self._queue = deque(range(num_sources))
        self._num_accepted = self._bytes_accepted = 0

    # -- what has happened

    def opened(self, source: int, now: float) -> None:
        self.lanes[source].open(self._num_places, now)
        self.progress_at = max(self.progress_at, now)

    def gained(self, source: int, places: Iterable[int], now: float) -> None:
        """The source has these chunks."""
        lane = self.lanes[source]
        for place in places:
            lane.has[place] = 1
        self.heard(source, now)

    def heard(self, source: int, now: float) -> None:
        """A frame of any kind has come."""
        lane = self.lanes[source]
        lane.heard_at = now
        self._note(lane, 0, now)
        lane.turn(now)

    def begin(self, source: int, place: int, now: float) -> bool:
        """A chunk begins to come. False: it is here already, or another is bringing it; it must not be written."""
        lane = self.lanes[source]
        self._note(lane, 0, now)
        lane.heard_at = now
        lane.has[place] = 1
        lane.outstanding.pop(place, None)
        writes = not self._done[place] and place not in self._writer
        if writes:
            self._writer[place] = source
            lane.begun, lane.starved = place, False
            self._cancel_elsewhere(source, place)
        lane.turn(now)
        return writes

    def progress(self, source: int, num_bytes: int, now: float) -> None:
        """Bytes of the chunk begun, or of one that is passed over, have come."""
        self._note(self.lanes[source], num_bytes, now)

    def accepted(self, source: int, place: int, num_bytes: int, now: float) -> None:
        """The chunk begun is complete and verified."""
        lane = self.lanes[source]
        self._done[place] = 1
        self.num_left -= 1
        self._num_accepted += 1
        self._bytes_accepted += num_bytes
        self.progress_at = now
        lane.strikes = 0
        self._let_go(lane)
        self._cancel_elsewhere(source, place)
        lane.turn(now)

    def release_revoked(self, source: int, now: float) -> bool:
        """True: what is coming in is not to be written any more, from this moment on."""
        lane = self.lanes[source]
        if not lane.revoked or lane.begun is None:
            return False
        place = lane.begun
        self._let_go(lane)
        self._give_back(place)
        lane.turn(now)
        return True

    def failed(self, source: int, *, final: bool) -> None:
        """Its connection is gone. It may be joined again, unless the failure is final or was one too many."""
        lane = self.lanes[source]
        self.num_repairs += 1
        lane.strikes += MAX_STRIKES if final else 1
        lost = list(lane.outstanding)
        if lane.begun is not None:
            lost.append(lane.begun)
        self._let_go(lane)
        lane.close()
        for place in lost:
            self._give_back(place)
        if lane.strikes < MAX_STRIKES:
            lane.phase = Phase.WAITING
            self._queue.append(source)
        else:
            lane.phase = Phase.GONE

    # -- what to do

    @property
    def exhausted(self) -> bool:
        return all(lane.phase is Phase.GONE for lane in self.lanes)

    @property
    def has_alternatives(self) -> bool:
        """Whether more than one source may still bring something."""
        return sum(lane.phase is not Phase.GONE for lane in self.lanes) > 1

    @property
    def chunk_bytes(self) -> float:
        """The mean so far; 0: not known."""
        return self._bytes_accepted / self._num_accepted if self._num_accepted else 0.0

    def review(self, now: float) -> list[int]:
        """Sees who is in doubt; returns the sources to be opened now."""
        for lane in self.lanes:
            if lane.phase is Phase.OPEN:
                self._note(lane, 0, now)
                self._doubt(lane, now)
        active = [lane for lane in self.lanes if lane.active]
        doubted = sum(lane.in_doubt(now) for lane in active)
        joined = self._join(self._rules.num_striped - (len(active) - doubted), now, hedging=doubted > 0)
        self._rest(active, now)
        return joined

    def orders(self, source: int) -> Orders:
        """What to tell this source now."""
        lane = self.lanes[source]
        cancelled, lane.cancels = lane.cancels, []
        wanted: list[int] = []
        if lane.asks and self.num_left:
            window = self._window(lane)
            if 2 * len(lane.outstanding) <= window:
                wanted = self._assign(source, lane, window - len(lane.outstanding))
        return Orders(wanted, cancelled)

    def ask(self, source: int, wanted: Iterable[int], now: float) -> None:
        """The orders' chunks are being asked for."""
        lane = self.lanes[source]
        if not lane.owes:
            lane.heard_at = now
        lane.outstanding.update(dict.fromkeys(wanted))
        lane.turn(now)

    def overdue(self, source: int, stall_s: float, starve_s: float, now: float) -> str:
        """Why this source is to be left for good; empty: it is not."""
        lane = self.lanes[source]
        if not lane.owes:
            return ""
        if now - lane.heard_at > stall_s:
            return f"nothing was received for {stall_s:g} s"
        if not lane.busy and now - max(self.progress_at, lane.since) > starve_s:
            return f"the source lives, and has had nothing to send for {starve_s:g} s"
        return ""

    # -- how

    def _note(self, lane: Lane, num_bytes: int, now: float) -> None:
        lane.note(num_bytes, now, sharing=len(self.lanes) > 1 and sum(other.active for other in self.lanes) > 1)

    def _doubt(self, lane: Lane, now: float) -> None:
        was_silent, was_slow, was_sound = lane.silent, lane.slow, not lane.in_doubt(now)
        lane.silent = lane.is_silent(self.chunk_bytes, now)
        waits_s = now - max(self.progress_at, lane.since)
        lane.starved = lane.owes and not lane.busy and waits_s > self._rules.patience_s
        if not lane.gauge.slow:
            lane.slow = False
        elif self._rules.hedge_slow and self._has_fallen():
            lane.slow = True
        if lane.silent and not was_silent:
            for place in lane.outstanding:
                self._give_back(place)
        if lane.slow and not was_slow:
            self._take_back(lane, keep=MIN_WINDOW)
        if lane.silent and lane.begun is not None and self._is_had(lane.begun, but=lane):
            lane.revoked = True
        if not was_sound and not lane.in_doubt(now):
            lane.sound_since = now

    def _has_fallen(self) -> bool:
        gauges = [lane.gauge for lane in self.lanes if lane.active]
        return sum(gauge.recent for gauge in gauges) < FALLEN_BELOW * sum(gauge.earlier for gauge in gauges)

    def _join(self, num_missing: int, now: float, *, hedging: bool) -> list[int]:
        joined = []
        for _ in range(num_missing):
            resting = next((lane for lane in self.lanes if lane.resting and not lane.in_doubt(now)), None)
            if resting is not None:
                resting.resting, resting.sound_since = False, now
                self.stirred = True
            elif self._queue:
                source = self._queue.popleft()
                self.lanes[source].phase, self.lanes[source].since = Phase.OPENING, now
                joined.append(source)
            else:
                break
            self.num_repairs += hedging
        return joined

    def _rest(self, active: list[Lane], now: float) -> None:
        """More than enough are sound, and have been for a while: the last to be named rest."""
        if len(active) <= self._rules.num_striped:
            return
        sound = [lane for lane in active if lane.phase is Phase.OPEN and not lane.in_doubt(now) and lane.owes]
        kept, spare = sound[: self._rules.num_striped], sound[self._rules.num_striped :]
        if spare and all(lane.busy and now - lane.sound_since > SETTLED_S for lane in kept):
            for lane in spare:
                lane.resting = True
                self._take_back(lane, keep=0)

    def _window(self, lane: Lane) -> int:
        chunk_bytes = self.chunk_bytes
        if lane.slow:
            return MIN_WINDOW
        if not chunk_bytes:
            return FIRST_WINDOW
        window_bytes = lane.gauge.recent * WINDOW_S or UNMEASURED_WINDOW_BYTES
        return min(max(int(window_bytes / chunk_bytes), MIN_WINDOW), MAX_WINDOW)

    def _assign(self, source: int, lane: Lane, room: int) -> list[int]:
        wanted, skipped = list[int](), list[int]()
        while self._free and len(wanted) < room and len(skipped) < LOOK_AHEAD:
            place = heapq.heappop(self._free)
            if not self._is_free(place):
                continue
            # What it lacks it may yet get; but if another has it, that one is asked.
            if lane.has[place] or not self._is_had(place, but=lane):
                wanted.append(place)
            else:
                skipped.append(place)
        for place in skipped:
            heapq.heappush(self._free, place)
        if len(wanted) < room and len(self.lanes) > 1:
            wanted += self._unblock(lane, room - len(wanted))
            if not wanted and not skipped:
                wanted += self._steal(lane)
        return wanted

    def _unblock(self, lane: Lane, room: int) -> list[int]:
        """Chunks that were asked of those who have not got them yet, and that this one has."""
        moved = list[int]()
        for other in self.lanes:
            if other is not lane:
                for place in [place for place in other.outstanding if lane.has[place] and not other.has[place]]:
                    if len(moved) < room and place not in lane.outstanding:
                        self._cancel(other, place)
                        moved.append(place)
        return sorted(moved)

    def _steal(self, lane: Lane) -> list[int]:
        """One chunk that this idle source will bring sooner than the one it was asked of."""
        fallback = max(other.gauge.recent for other in self.lanes)
        mine_s = lane.eta_s(self.chunk_bytes, 1, fallback) * STEAL_FACTOR + STEAL_S
        others = [
            (other.eta_s(self.chunk_bytes, other.begun is not None, fallback), other)
            for other in self.lanes
            if other is not lane and other.phase is Phase.OPEN and other.owes
        ]
        for theirs_s, other in sorted(others, key=lambda entry: -entry[0]):
            place = next((place for place in reversed(other.outstanding) if lane.has[place]), None)
            if place is not None:
                if theirs_s > mine_s and place not in lane.outstanding:
                    self._cancel(other, place)
                    return [place]
            # What has begun to come may be nearly here: it is given up to an idle source of more than twice the speed.
            elif other.begun is not None and lane.has[other.begun] and not lane.owes and theirs_s > 2 * mine_s:
                other.revoked = True
        return []

    def _is_free(self, place: int) -> bool:
        if self._done[place] or place in self._writer:
            return False
        return not any(place in lane.outstanding and not lane.silent for lane in self.lanes)

    def _is_had(self, place: int, but: Lane) -> bool:
        return any(lane is not but and lane.asks and lane.has[place] for lane in self.lanes)

    def _give_back(self, place: int) -> None:
        if not self._done[place]:
            heapq.heappush(self._free, place)
            self.stirred = True

    def _take_back(self, lane: Lane, keep: int) -> None:
        for place in list(lane.outstanding)[keep:]:
            self._cancel(lane, place)
            self._give_back(place)

    def _cancel(self, lane: Lane, place: int) -> None:
        del lane.outstanding[place]
        lane.cancels.append(place)
        self.stirred = True

    def _cancel_elsewhere(self, source: int, place: int) -> None:
        for number, lane in enumerate(self.lanes):
            if number != source and place in lane.outstanding:
                self._cancel(lane, place)

    def _let_go(self, lane: Lane) -> None:
        if lane.begun is not None:
            self._writer.pop(lane.begun, None)
        lane.begun, lane.revoked = None, False
