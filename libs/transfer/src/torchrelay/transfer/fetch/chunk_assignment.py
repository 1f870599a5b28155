"""Assigns chunks to sources. Pure; time is an argument.

Chunks are assigned in the order wanted. Each source has a window of outstanding requests, sized to what it delivers in
``WINDOW_S``. At most one source writes a chunk at a time, and an accepted chunk is never requested again.

Chunks are identified by their position in the order wanted, sources by their index in ``states``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from torchrelay.transfer.fetch.source_state import SourcePhase, SourceState

WINDOW_S = 0.05
MIN_WINDOW, FIRST_WINDOW, MAX_WINDOW = 2, 4, 64
UNMEASURED_WINDOW_BYTES = 2 << 20
STEAL_FACTOR, STEAL_S = 1.25, 0.01  # margin by which an idle source must be faster to take over a chunk
LOOK_AHEAD = 64


@dataclass(frozen=True, slots=True)
class ChunkRequests:
    """Messages for a source: chunks to request, and earlier requests to cancel."""

    wanted: list[int]
    cancelled: list[int]


class ChunkAssignment:
    """The chunks of one transfer; ``states`` is shared with the policy, which adds sources to it."""

    def __init__(self, num_chunks: int, states: list[SourceState]) -> None:
        self.num_chunks = self.num_left = num_chunks
        self.has_changes = False  # chunks became available, or requests must be cancelled
        self.progress_at = 0.0
        self._states = states
        self._done = bytearray(num_chunks)
        self._receiving: set[int] = set()  # chunks that some source is writing
        self._available = list(range(num_chunks))  # a heap; may contain chunks that were taken since
        self._num_accepted = self._bytes_accepted = 0

    @property
    def chunk_bytes(self) -> float:
        """The mean size of accepted chunks; 0: none yet."""
        return self._bytes_accepted / self._num_accepted if self._num_accepted else 0.0

    # -- events of the sources

    def record(self, state: SourceState, num_bytes: int, now: float) -> None:
        """Adds received bytes, written or skipped, or the passing of time alone, to a source's measured rate."""
        sharing = len(self._states) > 1 and sum(other.active for other in self._states) > 1
        state.record(num_bytes, now, sharing=sharing)

    def begin(self, source: int, position: int, now: float) -> bool:
        """Records that a chunk starts to arrive. False: skip it, since it is here or another source is writing it."""
        state = self._states[source]
        self.record(state, 0, now)
        state.last_frame_at = now
        state.has[position] = 1
        state.outstanding.pop(position, None)
        writes = not self._done[position] and position not in self._receiving
        if writes:
            self._receiving.add(position)
            state.receiving, state.starved = position, False
            self._cancel_elsewhere(state, position)
        state.update_busy(now)
        return writes

    def accepted(self, source: int, position: int, num_bytes: int, now: float) -> None:
        """Records that the arriving chunk is complete and verified."""
        state = self._states[source]
        self._done[position] = 1
        self.num_left -= 1
        self._num_accepted += 1
        self._bytes_accepted += num_bytes
        self.progress_at = now
        state.num_failures = 0
        self._clear_receiving(state)
        self._cancel_elsewhere(state, position)
        state.update_busy(now)

    def release_revoked(self, source: int, now: float) -> bool:
        """Releases the arriving chunk if it was revoked. True: the source must stop writing it immediately."""
        state = self._states[source]
        if not state.revoked or state.receiving is None:
            return False
        position = state.receiving
        self._clear_receiving(state)
        self.make_available(position)
        state.update_busy(now)
        return True

    # -- requests

    def requests(self, source: int) -> ChunkRequests:
        """Takes the requests and cancellations to send to this source now."""
        state = self._states[source]
        cancelled, state.cancels = state.cancels, []
        wanted: list[int] = []
        if state.accepts_requests and self.num_left:
            # Chunks that it does not have yet fill a separate window; otherwise a chunk that another source gave up
            # could not be requested from it.
            num_had = sum(state.has[position] for position in state.outstanding)
            window = self._window(state)
            num_present = _num_to_request(window, num_had)
            num_ahead = _num_to_request(window, len(state.outstanding) - num_had) if 0 in state.has else 0
            if num_present or num_ahead:
                wanted = self._assign(state, num_present, num_ahead)
        return ChunkRequests(wanted, cancelled)

    def ask(self, source: int, wanted: Iterable[int], now: float) -> None:
        """Records that these chunks are being requested from the source."""
        state = self._states[source]
        if not state.has_outstanding:
            state.last_frame_at = now
        state.outstanding.update(dict.fromkeys(wanted))
        state.update_busy(now)

    # -- withdrawals by the policy

    def disconnect(self, state: SourceState) -> None:
        """Makes the chunks that a disconnected source still owed available again."""
        lost = list(state.outstanding)
        if state.receiving is not None:
            lost.append(state.receiving)
        self._clear_receiving(state)
        state.close()
        for position in lost:
            self.make_available(position)

    def withdraw(self, state: SourceState, keep: int) -> None:
        """Cancels all but the first ``keep`` outstanding requests, so that other sources can take them."""
        for position in list(state.outstanding)[keep:]:
            self._cancel(state, position)
            self.make_available(position)

    def make_available(self, position: int) -> None:
        """Makes a chunk available to be requested again, or from one more source."""
        if not self._done[position]:
            heapq.heappush(self._available, position)
            self.has_changes = True

    def is_elsewhere(self, position: int, but: SourceState) -> bool:
        """Whether another source that accepts requests has the chunk."""
        return any(state is not but and state.accepts_requests and state.has[position] for state in self._states)

    def _window(self, state: SourceState) -> int:
        chunk_bytes = self.chunk_bytes
        if state.slow:
            return MIN_WINDOW
        if not chunk_bytes:
            return FIRST_WINDOW
        window_bytes = state.monitor.recent * WINDOW_S or UNMEASURED_WINDOW_BYTES
        return min(max(int(window_bytes / chunk_bytes), MIN_WINDOW), MAX_WINDOW)

    def _assign(self, state: SourceState, num_present: int, num_ahead: int) -> list[int]:
        """Up to ``num_present`` chunks that this source has, and up to ``num_ahead`` that it lacks."""
        wanted, skipped = list[int](), list[int]()
        while self._available and (num_present or num_ahead) and len(skipped) < LOOK_AHEAD:
            position = heapq.heappop(self._available)
            if not self._is_available(position):
                continue
            if state.has[position] and num_present:
                wanted.append(position)
                num_present -= 1
            # It may still receive a chunk that it lacks, but a source that has the chunk comes first.
            elif not state.has[position] and num_ahead and not self.is_elsewhere(position, but=state):
                wanted.append(position)
                num_ahead -= 1
            else:
                skipped.append(position)
        for position in skipped:
            heapq.heappush(self._available, position)
        if num_present and len(self._states) > 1:
            wanted += self._unblock(state, num_present)
            if not wanted and not skipped:
                wanted += self._steal(state)
        return wanted

    def _unblock(self, state: SourceState, num_more: int) -> list[int]:
        """Moves chunks to this source that it has, from sources that were asked for them and do not have them yet."""
        moved = list[int]()
        for other in self._states:
            if other is not state:
                for position in [chunk for chunk in other.outstanding if state.has[chunk] and not other.has[chunk]]:
                    if len(moved) < num_more and position not in state.outstanding:
                        self._cancel(other, position)
                        moved.append(position)
        return sorted(moved)

    def _steal(self, state: SourceState) -> list[int]:
        """Moves a chunk to this idle source that it would deliver sooner than the source that was asked for it."""
        fallback = max(other.monitor.recent for other in self._states)
        own_eta_s = state.eta_s(self.chunk_bytes, 1, fallback) * STEAL_FACTOR + STEAL_S
        others = [
            (other.eta_s(self.chunk_bytes, other.receiving is not None, fallback), other)
            for other in self._states
            if other is not state and other.phase is SourcePhase.OPEN and other.has_outstanding
        ]
        for eta_s, other in sorted(others, key=lambda entry: -entry[0]):
            position = next((chunk for chunk in reversed(other.outstanding) if state.has[chunk]), None)
            if position is not None:
                if eta_s > own_eta_s and position not in state.outstanding:
                    self._cancel(other, position)
                    return [position]
            # An arriving chunk may be nearly complete: only an idle source of over twice the speed takes it over.
            elif (
                other.receiving is not None
                and state.has[other.receiving]
                and not state.has_outstanding
                and eta_s > 2 * own_eta_s
            ):
                other.revoked = True
        return []

    def _is_available(self, position: int) -> bool:
        if self._done[position] or position in self._receiving:
            return False
        return not any(position in state.outstanding and not state.silent for state in self._states)

    def _cancel(self, state: SourceState, position: int) -> None:
        del state.outstanding[position]
        state.cancels.append(position)
        self.has_changes = True

    def _cancel_elsewhere(self, receiving: SourceState, position: int) -> None:
        for state in self._states:
            if state is not receiving and position in state.outstanding:
                self._cancel(state, position)

    def _clear_receiving(self, state: SourceState) -> None:
        if state.receiving is not None:
            self._receiving.discard(state.receiving)
        state.receiving, state.revoked = None, False


def _num_to_request(window: int, num_outstanding: int) -> int:
    """The number of further chunks to request; 0 until half the window is free, so that requests are batched."""
    return window - num_outstanding if 2 * num_outstanding <= window else 0
