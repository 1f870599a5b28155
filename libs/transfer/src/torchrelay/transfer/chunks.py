"""Which source is asked for which chunk: the part of ``swarm`` that hands them out. Pure; time is given.

Chunks are handed out in the order wanted, a window of them to each source, as large as what it brings in a twentieth
of a second. One source at a time writes a chunk. Nothing that was accepted is asked for again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from torchrelay.transfer.lanes import Lane, Phase

WINDOW_S = 0.05
MIN_WINDOW, FIRST_WINDOW, MAX_WINDOW = 2, 4, 64
UNMEASURED_WINDOW_BYTES = 2 << 20
STEAL_FACTOR, STEAL_S = 1.25, 0.01  # an idle source takes a chunk over when it is sooner by this
LOOK_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Orders:
    """What to tell one source: chunks to ask for, chunks no longer wanted. By place here, by number to the source."""

    wanted: list[int]
    cancelled: list[int]


class Chunks:
    """``num_places`` chunks and the lanes of ``num_sources`` sources, by their numbers."""

    def __init__(self, num_places: int, num_sources: int) -> None:
        self.lanes = [Lane() for _ in range(num_sources)]
        self.num_left = num_places
        self.stirred = False  # chunks have become free, or there is something to cancel
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

    def orders(self, source: int) -> Orders:
        """What to tell this source now."""
        lane = self.lanes[source]
        cancelled, lane.cancels = lane.cancels, []
        wanted: list[int] = []
        if lane.asks and self.num_left:
            # What it has not got yet fills a window of its own: else a chunk given back could not be asked of it.
            num_had = sum(lane.has[place] for place in lane.outstanding)
            window = self._window(lane)
            room = _room(window, num_had)
            room_ahead = _room(window, len(lane.outstanding) - num_had) if 0 in lane.has else 0
            if room or room_ahead:
                wanted = self._assign(lane, room, room_ahead)
        return Orders(wanted, cancelled)

    def ask(self, source: int, wanted: Iterable[int], now: float) -> None:
        """The orders' chunks are being asked for."""
        lane = self.lanes[source]
        if not lane.owes:
            lane.heard_at = now
        lane.outstanding.update(dict.fromkeys(wanted))
        lane.turn(now)

    def _note(self, lane: Lane, num_bytes: int, now: float) -> None:
        lane.note(num_bytes, now, sharing=len(self.lanes) > 1 and sum(other.active for other in self.lanes) > 1)

    def _window(self, lane: Lane) -> int:
        chunk_bytes = self.chunk_bytes
        if lane.slow:
            return MIN_WINDOW
        if not chunk_bytes:
            return FIRST_WINDOW
        window_bytes = lane.gauge.recent * WINDOW_S or UNMEASURED_WINDOW_BYTES
        return min(max(int(window_bytes / chunk_bytes), MIN_WINDOW), MAX_WINDOW)

    def _assign(self, lane: Lane, room: int, room_ahead: int) -> list[int]:
        """So many chunks that this source has, and so many that it lacks."""
        wanted, skipped = list[int](), list[int]()
        while self._free and (room or room_ahead) and len(skipped) < LOOK_AHEAD:
            place = heapq.heappop(self._free)
            if not self._is_free(place):
                continue
            if lane.has[place] and room:
                wanted.append(place)
                room -= 1
            # What it lacks it may yet get; but if another has it, that one is asked.
            elif not lane.has[place] and room_ahead and not self._is_had(place, but=lane):
                wanted.append(place)
                room_ahead -= 1
            else:
                skipped.append(place)
        for place in skipped:
            heapq.heappush(self._free, place)
        if room and len(self.lanes) > 1:
            wanted += self._unblock(lane, room)
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


def _room(window: int, num_asked: int) -> int:
    """How many more to ask for; 0 until half the window is free, so that chunks are asked for several at a time."""
    return window - num_asked if 2 * num_asked <= window else 0
