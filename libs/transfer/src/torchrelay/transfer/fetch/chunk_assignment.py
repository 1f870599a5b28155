"""Which source is asked for which chunk: the part of ``swarm`` that hands them out. Pure; time is given.

Chunks are handed out in the order wanted, a window of them to each source, as large as what it brings in a twentieth
of a second. One source at a time writes a chunk. Nothing that was accepted is asked for again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from torchrelay.transfer.fetch.source_state import SourcePhase, SourceState

WINDOW_S = 0.05
MIN_WINDOW, FIRST_WINDOW, MAX_WINDOW = 2, 4, 64
UNMEASURED_WINDOW_BYTES = 2 << 20
STEAL_FACTOR, STEAL_S = 1.25, 0.01  # an idle source takes a chunk over when it is sooner by this
LOOK_AHEAD = 64


@dataclass(frozen=True, slots=True)
class ChunkRequests:
    """What to tell one source: chunks to ask for, chunks no longer wanted. By place here, by number to the source."""

    wanted: list[int]
    cancelled: list[int]


class ChunkAssignment:
    """``num_places`` chunks and the lanes of ``num_sources`` sources, by their numbers."""

    def __init__(self, num_places: int, num_sources: int) -> None:
        self.states = [SourceState() for _ in range(num_sources)]
        self.num_left = num_places
        self.has_changes = False  # chunks have become free, or there is something to cancel
        self.progress_at = 0.0
        self._num_places = num_places
        self._done = bytearray(num_places)
        self._writer: dict[int, int] = {}  # into whose hands a chunk is coming
        self._free = list(range(num_places))  # a heap; may name what is not free any more
        self._num_accepted = self._bytes_accepted = 0

    @property
    def chunk_bytes(self) -> float:
        """The mean so far; 0: not known."""
        return self._bytes_accepted / self._num_accepted if self._num_accepted else 0.0

    def begin(self, source: int, place: int, now: float) -> bool:
        """A chunk begins to come. False: it is here already, or another is bringing it; it must not be written."""
        state = self.states[source]
        self._record(state, 0, now)
        state.last_frame_at = now
        state.has[place] = 1
        state.outstanding.pop(place, None)
        writes = not self._done[place] and place not in self._writer
        if writes:
            self._writer[place] = source
            state.receiving, state.starved = place, False
            self._cancel_elsewhere(source, place)
        state.update_busy(now)
        return writes

    def progress(self, source: int, num_bytes: int, now: float) -> None:
        """Bytes of the chunk begun, or of one that is passed over, have come."""
        self._record(self.states[source], num_bytes, now)

    def accepted(self, source: int, place: int, num_bytes: int, now: float) -> None:
        """The chunk begun is complete and verified."""
        state = self.states[source]
        self._done[place] = 1
        self.num_left -= 1
        self._num_accepted += 1
        self._bytes_accepted += num_bytes
        self.progress_at = now
        state.num_failures = 0
        self._clear_receiving(state)
        self._cancel_elsewhere(source, place)
        state.update_busy(now)

    def release_revoked(self, source: int, now: float) -> bool:
        """True: what is coming in is not to be written any more, from this moment on."""
        state = self.states[source]
        if not state.revoked or state.receiving is None:
            return False
        place = state.receiving
        self._clear_receiving(state)
        self._make_available(place)
        state.update_busy(now)
        return True

    def requests(self, source: int) -> ChunkRequests:
        """What to tell this source now."""
        state = self.states[source]
        cancelled, state.cancels = state.cancels, []
        wanted: list[int] = []
        if state.accepts_requests and self.num_left:
            # What it has not got yet fills a window of its own: else a chunk given back could not be asked of it.
            num_had = sum(state.has[place] for place in state.outstanding)
            window = self._window(state)
            room = _room(window, num_had)
            room_ahead = _room(window, len(state.outstanding) - num_had) if 0 in state.has else 0
            if room or room_ahead:
                wanted = self._assign(state, room, room_ahead)
        return ChunkRequests(wanted, cancelled)

    def ask(self, source: int, wanted: Iterable[int], now: float) -> None:
        """The orders' chunks are being asked for."""
        state = self.states[source]
        if not state.has_outstanding:
            state.last_frame_at = now
        state.outstanding.update(dict.fromkeys(wanted))
        state.update_busy(now)

    def _record(self, state: SourceState, num_bytes: int, now: float) -> None:
        state.record(num_bytes, now, sharing=len(self.states) > 1 and sum(other.active for other in self.states) > 1)

    def _window(self, state: SourceState) -> int:
        chunk_bytes = self.chunk_bytes
        if state.slow:
            return MIN_WINDOW
        if not chunk_bytes:
            return FIRST_WINDOW
        window_bytes = state.monitor.recent * WINDOW_S or UNMEASURED_WINDOW_BYTES
        return min(max(int(window_bytes / chunk_bytes), MIN_WINDOW), MAX_WINDOW)

    def _assign(self, state: SourceState, room: int, room_ahead: int) -> list[int]:
        """So many chunks that this source has, and so many that it lacks."""
        wanted, skipped = list[int](), list[int]()
        while self._free and (room or room_ahead) and len(skipped) < LOOK_AHEAD:
            place = heapq.heappop(self._free)
            if not self._is_free(place):
                continue
            if state.has[place] and room:
                wanted.append(place)
                room -= 1
            # What it lacks it may yet get; but if another has it, that one is asked.
            elif not state.has[place] and room_ahead and not self._is_elsewhere(place, but=state):
                wanted.append(place)
                room_ahead -= 1
            else:
                skipped.append(place)
        for place in skipped:
            heapq.heappush(self._free, place)
        if room and len(self.states) > 1:
            wanted += self._unblock(state, room)
            if not wanted and not skipped:
                wanted += self._steal(state)
        return wanted

    def _unblock(self, state: SourceState, room: int) -> list[int]:
        """Chunks that were asked of those who have not got them yet, and that this one has."""
        moved = list[int]()
        for other in self.states:
            if other is not state:
                for place in [place for place in other.outstanding if state.has[place] and not other.has[place]]:
                    if len(moved) < room and place not in state.outstanding:
                        self._cancel(other, place)
                        moved.append(place)
        return sorted(moved)

    def _steal(self, state: SourceState) -> list[int]:
        """One chunk that this idle source will bring sooner than the one it was asked of."""
        fallback = max(other.monitor.recent for other in self.states)
        mine_s = state.eta_s(self.chunk_bytes, 1, fallback) * STEAL_FACTOR + STEAL_S
        others = [
            (other.eta_s(self.chunk_bytes, other.receiving is not None, fallback), other)
            for other in self.states
            if other is not state and other.phase is SourcePhase.OPEN and other.has_outstanding
        ]
        for theirs_s, other in sorted(others, key=lambda entry: -entry[0]):
            place = next((place for place in reversed(other.outstanding) if state.has[place]), None)
            if place is not None:
                if theirs_s > mine_s and place not in state.outstanding:
                    self._cancel(other, place)
                    return [place]
            # What has begun to come may be nearly here: it is given up to an idle source of more than twice the speed.
            elif (
                other.receiving is not None
                and state.has[other.receiving]
                and not state.has_outstanding
                and theirs_s > 2 * mine_s
            ):
                other.revoked = True
        return []

    def _is_free(self, place: int) -> bool:
        if self._done[place] or place in self._writer:
            return False
        return not any(place in state.outstanding and not state.silent for state in self.states)

    def _is_elsewhere(self, place: int, but: SourceState) -> bool:
        return any(state is not but and state.accepts_requests and state.has[place] for state in self.states)

    def _make_available(self, place: int) -> None:
        if not self._done[place]:
            heapq.heappush(self._free, place)
            self.has_changes = True

    def _withdraw(self, state: SourceState, keep: int) -> None:
        for place in list(state.outstanding)[keep:]:
            self._cancel(state, place)
            self._make_available(place)

    def _cancel(self, state: SourceState, place: int) -> None:
        del state.outstanding[place]
        state.cancels.append(place)
        self.has_changes = True

    def _cancel_elsewhere(self, source: int, place: int) -> None:
        for number, state in enumerate(self.states):
            if number != source and place in state.outstanding:
                self._cancel(state, place)

    def _clear_receiving(self, state: SourceState) -> None:
        if state.receiving is not None:
            self._writer.pop(state.receiving, None)
        state.receiving, state.revoked = None, False


def _room(window: int, num_asked: int) -> int:
    """How many more to ask for; 0 until half the window is free, so that chunks are asked for several at a time."""
    return window - num_asked if 2 * num_asked <= window else 0
