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

from torchrelay.transfer.fetch.chunk_assignment import MIN_WINDOW, ChunkAssignment
from torchrelay.transfer.fetch.source_state import SourcePhase, SourceState

MAX_FAILURES = 2  # failures in a row, with no chunk between them, that a source is allowed
PATIENCE_S = 0.5  # how long a source may have nothing: those above it are repairing
# A source that was in doubt has to be sound for so long before others rest, and twice as long each time it turned slow
# again: one that was called sound because another took a part of the way in may not be so alone.
PROBATION_S, MAX_PROBATION_S = 0.3, 10.0
THROUGHPUT_DROP = 0.75  # a source that turned slow is of no concern while all together bring so much of what they did


@dataclass(frozen=True, slots=True)
class SourceRules:
    """``num_striped`` sources are followed at once; ``hedge_slow``: a slow one is a reason to join another."""

    num_striped: int = 1
    hedge_slow: bool = True
    patience_s: float = PATIENCE_S


class SourcePolicy(ChunkAssignment):
    """The state of one transfer of ``num_places`` chunks from up to ``num_sources`` sources, by their numbers."""

    def __init__(self, num_places: int, num_sources: int, rules: SourceRules) -> None:
        super().__init__(num_places, num_sources)
        self.num_repairs = 0  # given up, or joined because another was in doubt
        self._rules = rules
        self._queue = deque(range(num_sources))

    # -- what has happened

    def opened(self, source: int, now: float) -> None:
        self.states[source].open(self._num_places, now)
        self.progress_at = max(self.progress_at, now)

    def gained(self, source: int, places: Iterable[int], now: float) -> None:
        """The source has these chunks."""
        state = self.states[source]
        for place in places:
            state.has[place] = 1
        self.frame_received(source, now)

    def frame_received(self, source: int, now: float) -> None:
        """A frame of any kind has come."""
        state = self.states[source]
        state.last_frame_at = now
        self._record(state, 0, now)
        state.update_busy(now)

    def failed(self, source: int, *, final: bool) -> None:
        """Its connection is gone. It may be joined again, unless the failure is final or was one too many."""
        state = self.states[source]
        self.num_repairs += 1
        state.num_failures += MAX_FAILURES if final else 1
        self._disconnect(state)
        if state.num_failures < MAX_FAILURES:
            state.phase = SourcePhase.WAITING
            self._queue.append(source)
        else:
            state.phase = SourcePhase.GONE

    def reopening(self, source: int, now: float) -> None:
        """Its connection is given up for another to the same source: nothing has failed."""
        state = self.states[source]
        was_standby = state.standby
        self._disconnect(state)
        state.phase, state.since, state.standby = SourcePhase.OPENING, now, was_standby

    def add_source(self, source: int) -> None:
        """A new source, by the next number, or a known one with a new chance. Unless it is open it is joined next."""
        if source == len(self.states):
            self.states.append(SourceState())
            self._queue.appendleft(source)
            return
        state = self.states[source]
        if state.phase is SourcePhase.WAITING:
            self._queue.remove(source)
        elif state.phase is not SourcePhase.GONE:
            return
        state.phase, state.num_failures = SourcePhase.WAITING, 0
        self._queue.appendleft(source)

    def raise_num_striped(self, num_striped: int) -> None:
        """At least so many sources are followed at once from now on."""
        if num_striped > self._rules.num_striped:
            self._rules = replace(self._rules, num_striped=num_striped)

    def enable_hedging(self) -> None:
        """From now on a slow source is a reason to join another."""
        self._rules = replace(self._rules, hedge_slow=True)

    # -- what to do

    @property
    def exhausted(self) -> bool:
        return all(state.phase is SourcePhase.GONE for state in self.states)

    @property
    def has_alternatives(self) -> bool:
        """Whether more than one source may still bring something."""
        return sum(state.phase is not SourcePhase.GONE for state in self.states) > 1

    def review(self, now: float) -> list[int]:
        """Sees who is in doubt; returns the sources to be opened now."""
        for state in self.states:
            if state.phase is SourcePhase.OPEN:
                self._record(state, 0, now)
                self._update_suspicion(state, now)
        active = [state for state in self.states if state.active]
        num_suspect = sum(state.is_suspect(now) for state in active)
        joined = self._join(self._rules.num_striped - (len(active) - num_suspect), now, hedging=num_suspect > 0)
        self._move_to_standby(active, now)
        return joined

    def overdue(self, source: int, stall_s: float, starve_s: float, now: float) -> str:
        """Why this source is to be left for good; empty: it is not."""
        state = self.states[source]
        if not state.has_outstanding:
            return ""
        if now - state.last_frame_at > stall_s:
            return f"nothing was received for {stall_s:g} s"
        if not state.busy and now - max(self.progress_at, state.since) > starve_s:
            return f"the source lives, and has had nothing to send for {starve_s:g} s"
        return ""

    # -- how

    def _disconnect(self, state: SourceState) -> None:
        lost = list(state.outstanding)
        if state.receiving is not None:
            lost.append(state.receiving)
        self._clear_receiving(state)
        state.close()
        for place in lost:
            self._make_available(place)

    def _update_suspicion(self, state: SourceState, now: float) -> None:
        was_silent, was_slow, was_healthy = state.silent, state.slow, not state.is_suspect(now)
        state.silent = state.is_silent(self.chunk_bytes, now)
        waits_s = now - max(self.progress_at, state.since)
        state.starved = state.has_outstanding and not state.busy and waits_s > self._rules.patience_s
        if not state.monitor.slow:
            state.slow = False
        elif self._rules.hedge_slow and self._throughput_dropped():
            state.slow = True
        if state.silent and not was_silent:
            for place in state.outstanding:
                self._make_available(place)
        if state.slow and not was_slow:
            self._withdraw(state, keep=MIN_WINDOW)
            state.probation_s = min(2 * state.probation_s, MAX_PROBATION_S) if state.probation_s else PROBATION_S
        if state.silent and state.receiving is not None and self._is_elsewhere(state.receiving, but=state):
            state.revoked = True
        if not was_healthy and not state.is_suspect(now):
            state.healthy_since = now

    def _throughput_dropped(self) -> bool:
        monitors = [state.monitor for state in self.states if state.active]
        return sum(monitor.recent for monitor in monitors) < THROUGHPUT_DROP * sum(
            monitor.baseline for monitor in monitors
        )

    def _join(self, num_missing: int, now: float, *, hedging: bool) -> list[int]:
        joined = []
        for _ in range(num_missing):
            standby = next((state for state in self.states if state.standby and not state.is_suspect(now)), None)
            if standby is not None:
                standby.standby, standby.healthy_since = False, now
                self.has_changes = True
            elif self._queue:
                source = self._queue.popleft()
                self.states[source].phase, self.states[source].since = SourcePhase.OPENING, now
                joined.append(source)
            else:
                break
            self.num_repairs += hedging
        return joined

    def _move_to_standby(self, active: list[SourceState], now: float) -> None:
        """More than enough are sound, and have been for a while: the last to be named rest."""
        if len(active) <= self._rules.num_striped:
            return
        healthy = [
            state
            for state in active
            if state.phase is SourcePhase.OPEN and not state.is_suspect(now) and state.has_outstanding
        ]
        kept, spare = healthy[: self._rules.num_striped], healthy[self._rules.num_striped :]
        if spare and all(
            state.busy and now - state.healthy_since > (state.probation_s or PROBATION_S) for state in kept
        ):
            for state in spare:
                state.standby = True
                self._withdraw(state, keep=0)
