"""Who is in doubt, and when another source is joined; with ``chunks``, what ``follow`` decides. Pure; time is given.

A source is in doubt when it has a chunk asked of it and brings nothing (silent), or much less than before (slow), when
it says for too long that it has none (starved), or does not open. For each in doubt one more is joined, as soon as it
is: the doubted one is kept, and may recover; then the other rests, connected. What was asked of a silent source is
asked of others too, and whoever brings it first wins; of a slow one it is taken back, but for a chunk or two. Towards
the end an idle source takes over what it will bring sooner than the one that was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchrelay.transfer.chunks import MIN_WINDOW, Chunks
from torchrelay.transfer.lanes import Lane, Phase

MAX_STRIKES = 2  # failures in a row, with no chunk between them, that a source is allowed
PATIENCE_S = 0.5  # how long a source may have nothing: those above it are repairing
# A source that was in doubt has to be sound for so long before others rest, and twice as long each time it turned slow
# again: one that was called sound because another took a part of the way in may not be so alone.
SETTLED_S, LONGEST_SETTLED_S = 0.3, 10.0
FALLEN_BELOW = 0.75  # a source that turned slow is of no concern while all together bring so much of what they did


@dataclass(frozen=True, slots=True)
class Rules:
    """``num_striped`` sources are followed at once; ``hedge_slow``: a slow one is a reason to join another."""

    num_striped: int = 1
    hedge_slow: bool = True
    patience_s: float = PATIENCE_S


class Swarm(Chunks):
    """The state of one transfer of ``num_places`` chunks from up to ``num_sources`` sources, by their numbers."""

    def __init__(self, num_places: int, num_sources: int, rules: Rules) -> None:
        super().__init__(num_places, num_sources)
        self.num_repairs = 0  # given up, or joined because another was in doubt
        self._rules = rules
        self._queue = deque(range(num_sources))

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

    def failed(self, source: int, *, final: bool) -> None:
        """Its connection is gone. It may be joined again, unless the failure is final or was one too many."""
        lane = self.lanes[source]
        self.num_repairs += 1
        lane.strikes += MAX_STRIKES if final else 1
        self._disconnect(lane)
        if lane.strikes < MAX_STRIKES:
            lane.phase = Phase.WAITING
            self._queue.append(source)
        else:
            lane.phase = Phase.GONE

    def reopening(self, source: int, now: float) -> None:
        """Its connection is given up for another to the same source: nothing has failed."""
        lane = self.lanes[source]
        is_resting = lane.resting
        self._disconnect(lane)
        lane.phase, lane.since, lane.resting = Phase.OPENING, now, is_resting

    def offer(self, source: int) -> None:
        """A new source, by the next number, or a known one with a new chance. Unless it is open it is joined next."""
        if source == len(self.lanes):
            self.lanes.append(Lane())
            self._queue.appendleft(source)
            return
        lane = self.lanes[source]
        if lane.phase is Phase.WAITING:
            self._queue.remove(source)
        elif lane.phase is not Phase.GONE:
            return
        lane.phase, lane.strikes = Phase.WAITING, 0
        self._queue.appendleft(source)

    def widen(self, num_striped: int) -> None:
        """At least so many sources are followed at once from now on."""
        if num_striped > self._rules.num_striped:
            self._rules = replace(self._rules, num_striped=num_striped)

    def hasten(self) -> None:
        """From now on a slow source is a reason to join another."""
        self._rules = replace(self._rules, hedge_slow=True)

    # -- what to do

    @property
    def exhausted(self) -> bool:
        return all(lane.phase is Phase.GONE for lane in self.lanes)

    @property
    def has_alternatives(self) -> bool:
        """Whether more than one source may still bring something."""
        return sum(lane.phase is not Phase.GONE for lane in self.lanes) > 1

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

    def _disconnect(self, lane: Lane) -> None:
        lost = list(lane.outstanding)
        if lane.begun is not None:
            lost.append(lane.begun)
        self._let_go(lane)
        lane.close()
        for place in lost:
            self._give_back(place)

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
            lane.settled_s = min(2 * lane.settled_s, LONGEST_SETTLED_S) if lane.settled_s else SETTLED_S
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
        if spare and all(lane.busy and now - lane.sound_since > (lane.settled_s or SETTLED_S) for lane in kept):
            for lane in spare:
                lane.resting = True
                self._take_back(lane, keep=0)
