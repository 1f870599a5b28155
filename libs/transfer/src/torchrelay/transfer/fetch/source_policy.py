"""Decides which sources are suspect and when alternates join. Pure; time is an argument.

A source is suspect when it has been asked for a chunk that it has and delivers nothing (silent) or far less than before
(slow), when it has had nothing to send for too long (starved), or when it does not open. For each suspect one alternate
joins immediately. The suspect stays and may recover; then the alternate goes on standby, still connected. Chunks
requested from a silent source are requested elsewhere too, and the first delivery wins; from a slow source they are
withdrawn, except for one or two. Near the end, an idle source takes over chunks that it would deliver sooner than the
source that was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torchrelay.transfer.fetch.chunk_assignment import MIN_WINDOW, ChunkAssignment
from torchrelay.transfer.fetch.source_state import SourcePhase, SourceState

MAX_FAILURES = 2  # consecutive failures without a chunk in between after which a source is given up
MAX_STARVED_S = 0.5  # how long a source may have nothing to send: its own sources may be under repair
# How long a recovered source must stay healthy before alternates go on standby, doubled each time it turns slow again:
# a source that looks healthy because another shares the load may not be healthy alone.
PROBATION_S, MAX_PROBATION_S = 0.3, 10.0
THROUGHPUT_DROP = 0.75  # a slow source is tolerated while all together deliver this share of their baseline


class SourcePolicy:
    """The sources of one transfer, named by their index in ``states``, which it shares with ``assignment``.

    ``num_striped`` sources are followed at once. ``hedge_slow``: an alternate joins when a source is slow. Both may be
    changed at any time.
    """

    def __init__(
        self, states: list[SourceState], assignment: ChunkAssignment, num_striped: int = 1, hedge_slow: bool = True
    ) -> None:
        self.num_striped, self.hedge_slow = num_striped, hedge_slow
        self.num_repairs = 0  # sources given up, or joined because another was suspect
        self._states, self._assignment = states, assignment
        self._queue = deque(range(len(states)))

    # -- events

    def opened(self, source: int, now: float) -> None:
        self._states[source].open(self._assignment.num_chunks, now)
        self._assignment.progress_at = max(self._assignment.progress_at, now)

    def gained(self, source: int, positions: Iterable[int], now: float) -> None:
        """Records that the source has these chunks."""
        state = self._states[source]
        for position in positions:
            state.has[position] = 1
        self.frame_received(source, now)

    def frame_received(self, source: int, now: float) -> None:
        state = self._states[source]
        state.last_frame_at = now
        self._assignment.record(state, 0, now)
        state.update_busy(now)

    def failed(self, source: int, *, final: bool) -> None:
        """Records a lost connection. The source may join again, unless the failure was final or one too many."""
        state = self._states[source]
        self.num_repairs += 1
        state.num_failures += MAX_FAILURES if final else 1
        self._assignment.disconnect(state)
        if state.num_failures < MAX_FAILURES:
            state.phase = SourcePhase.WAITING
            self._queue.append(source)
        else:
            state.phase = SourcePhase.GONE

    def reopening(self, source: int, now: float) -> None:
        """Records that a connection is replaced by a new one to the same source, without a failure."""
        state = self._states[source]
        was_standby = state.standby
        self._assignment.disconnect(state)
        state.phase, state.since, state.standby = SourcePhase.OPENING, now, was_standby

    def add_source(self, source: int) -> None:
        """Adds a new source (the next index), or lets a known source join again. It joins next, unless it is open."""
        if source == len(self._states):
            self._states.append(SourceState())
            self._queue.appendleft(source)
            return
        state = self._states[source]
        if state.phase is SourcePhase.WAITING:
            self._queue.remove(source)
        elif state.phase is not SourcePhase.GONE:
            return
        state.phase, state.num_failures = SourcePhase.WAITING, 0
        self._queue.appendleft(source)

    # -- decisions

    @property
    def exhausted(self) -> bool:
        return all(state.phase is SourcePhase.GONE for state in self._states)

    @property
    def has_alternatives(self) -> bool:
        """Whether more than one source may still deliver."""
        return sum(state.phase is not SourcePhase.GONE for state in self._states) > 1

    def review(self, now: float) -> list[int]:
        """Updates the suspects; returns the sources to open now."""
        for state in self._states:
            if state.phase is SourcePhase.OPEN:
                self._assignment.record(state, 0, now)
                self._update_suspicion(state, now)
        active = [state for state in self._states if state.active]
        num_suspect = sum(state.is_suspect(now) for state in active)
        joined = self._join(self.num_striped - (len(active) - num_suspect), now, hedging=num_suspect > 0)
        self._move_to_standby(active, now)
        return joined

    def overdue(self, source: int, stall_s: float, starve_s: float, now: float) -> str:
        """The reason to drop this source; empty: there is none."""
        state = self._states[source]
        if not state.has_outstanding:
            return ""
        if now - state.last_frame_at > stall_s:
            return f"nothing was received for {stall_s:g} s"
        if not state.busy and now - max(self._assignment.progress_at, state.since) > starve_s:
            return f"the source is alive but had nothing to send for {starve_s:g} s"
        return ""

    def _update_suspicion(self, state: SourceState, now: float) -> None:
        was_silent, was_slow, was_healthy = state.silent, state.slow, not state.is_suspect(now)
        state.silent = state.is_silent(self._assignment.chunk_bytes, now)
        waited_s = now - max(self._assignment.progress_at, state.since)
        state.starved = state.has_outstanding and not state.busy and waited_s > MAX_STARVED_S
        if not state.monitor.slow:
            state.slow = False
        elif self.hedge_slow and self._throughput_dropped():
            state.slow = True
        if state.silent and not was_silent:
            for position in state.outstanding:
                self._assignment.make_available(position)
        if state.slow and not was_slow:
            self._assignment.withdraw(state, keep=MIN_WINDOW)
            state.probation_s = min(2 * state.probation_s, MAX_PROBATION_S) if state.probation_s else PROBATION_S
        if state.silent and state.receiving is not None and self._assignment.is_elsewhere(state.receiving, but=state):
            state.revoked = True
        if not was_healthy and not state.is_suspect(now):
            state.healthy_since = now

    def _throughput_dropped(self) -> bool:
        monitors = [state.monitor for state in self._states if state.active]
        baseline = sum(monitor.baseline for monitor in monitors)
        return sum(monitor.recent for monitor in monitors) < THROUGHPUT_DROP * baseline

    def _join(self, num_missing: int, now: float, *, hedging: bool) -> list[int]:
        joined = []
        for _ in range(num_missing):
            standby = next((state for state in self._states if state.standby and not state.is_suspect(now)), None)
            if standby is not None:
                standby.standby, standby.healthy_since = False, now
                self._assignment.has_changes = True
            elif self._queue:
                source = self._queue.popleft()
                self._states[source].phase, self._states[source].since = SourcePhase.OPENING, now
                joined.append(source)
            else:
                break
            self.num_repairs += hedging
        return joined

    def _move_to_standby(self, active: list[SourceState], now: float) -> None:
        """Puts surplus sources on standby once the others have been healthy through their probation."""
        if len(active) <= self.num_striped:
            return
        healthy = [s for s in active if s.phase is SourcePhase.OPEN and not s.is_suspect(now) and s.has_outstanding]
        kept, spare = healthy[: self.num_striped], healthy[self.num_striped :]
        if spare and all(s.busy and now - s.healthy_since > (s.probation_s or PROBATION_S) for s in kept):
            for state in spare:
                state.standby = True
                self._assignment.withdraw(state, keep=0)
