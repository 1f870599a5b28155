"""Simulates a relay chunk by chunk: the requests of followers, and each chunk's time on either link.

It is independent of the planner's model. Every host sends one chunk at a time, round robin among waiting followers, and
receives one chunk at a time. A follower requests from each source a few of the earliest unrequested chunks that the
source has. If another source is idle, it reassigns chunks whose transfer has not started. Hosts forward only complete
chunks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 2  # chunks requested and not received, per source


@dataclass(slots=True, eq=False)
class _Flow:
    source: _End
    target: _End
    asked: deque[int] = field(default_factory=deque)  # not started
    num_open: int = 0  # requested, not received
    queued: bool = False  # in the source's round robin


@dataclass(slots=True, eq=False)
class _End:
    send_s: float  # per chunk
    take_s: float
    have: bytearray
    wanted: bytearray  # 1: not requested yet
    num_have: int = 0
    lowest: int = 0  # no lower chunk is wanted
    highest: int = -1  # the last chunk it has
    sending: bool = False
    taking_until: float = 0.0
    ready_s: float = 0.0
    up: list[_Flow] = field(default_factory=list)
    down: list[_Flow] = field(default_factory=list)
    turn: deque[_Flow] = field(default_factory=deque)


class Simulation:
    """``rates``: egress and ingress of each host in bytes per second; ``feeds``: the sources of each target."""

    def __init__(
        self,
        rates: Mapping[str, tuple[float, float]],
        whole: Sequence[str],
        feeds: Mapping[str, Sequence[str]],
        num_chunks: int,
        chunk_bytes: float,
    ) -> None:
        self._num_chunks = num_chunks
        self._events: list[tuple[float, int, _Flow, int]] = []  # when, number, flow, chunk (-1: the source is free)
        self._number = 0
        self._now = 0.0
        self._ends: dict[str, _End] = {}
        for name, (out, into) in rates.items():
            there = name in whole
            have, wanted = bytearray([there]) * num_chunks, bytearray([not there]) * num_chunks
            end = _End(chunk_bytes / out, chunk_bytes / into, have, wanted)
            if there:
                end.num_have, end.highest, end.lowest = num_chunks, num_chunks - 1, num_chunks
            self._ends[name] = end
        for target, sources in feeds.items():
            for source in sources:
                flow = _Flow(self._ends[source], self._ends[target])
                flow.source.down.append(flow)
                flow.target.up.append(flow)
        self._targets = list(feeds)

    def run(self) -> dict[str, float]:
        """Seconds until each target has every chunk. Raises ``RuntimeError`` when some never arrive."""
        for name in self._targets:
            for flow in self._ends[name].up:
                self._ask(flow)
        events = self._events
        while events:
            self._now, _, flow, chunk = heapq.heappop(events)
            if chunk < 0:
                flow.source.sending = False
                self._send(flow.source)
            else:
                self._arrived(flow, chunk)
        stuck = [name for name in self._targets if self._ends[name].num_have < self._num_chunks]
        if stuck:
            raise RuntimeError(f"never filled: {', '.join(stuck)}")
        return {name: self._ends[name].ready_s for name in self._targets}

    def _ask(self, flow: _Flow) -> None:
        source, target = flow.source, flow.target
        while flow.num_open < WINDOW:
            while target.lowest < self._num_chunks and not target.wanted[target.lowest]:
                target.lowest += 1
            chunk = target.lowest
            while chunk <= source.highest and not (target.wanted[chunk] and source.have[chunk]):
                chunk += 1
            if chunk > source.highest:
                if flow.num_open or not self._steal(flow):
                    return
                continue
            target.wanted[chunk] = 0
            self._put(flow, chunk)

    def _steal(self, flow: _Flow) -> bool:
        """Reassigns a request that another source has not started to an idle one."""
        busiest = max(flow.target.up, key=lambda other: len(other.asked))
        if not busiest.asked or not flow.source.have[busiest.asked[-1]]:
            return False
        chunk = busiest.asked.pop()
        busiest.num_open -= 1
        self._put(flow, chunk)
        return True

    def _put(self, flow: _Flow, chunk: int) -> None:
        flow.asked.append(chunk)
        flow.num_open += 1
        if not flow.queued:
            flow.queued = True
            flow.source.turn.append(flow)
        if not flow.source.sending:
            self._send(flow.source)

    def _send(self, source: _End) -> None:
        turn = source.turn
        while turn:
            flow = turn.popleft()
            if not flow.asked:  # reassigned
                flow.queued = False
                continue
            chunk = flow.asked.popleft()
            if flow.asked:
                turn.append(flow)
            else:
                flow.queued = False
            target = flow.target
            sent = self._now + source.send_s
            begin = target.taking_until if target.taking_until > self._now else self._now
            target.taking_until = begin + target.take_s
            source.sending = True
            self._push(sent, flow, -1)
            self._push(max(sent, target.taking_until), flow, chunk)
            return

    def _push(self, at: float, flow: _Flow, chunk: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, flow, chunk))

    def _arrived(self, flow: _Flow, chunk: int) -> None:
        target = flow.target
        flow.num_open -= 1
        target.have[chunk] = 1
        target.num_have += 1
        if chunk > target.highest:
            target.highest = chunk
        if target.num_have == self._num_chunks:
            target.ready_s = self._now
        else:
            self._ask(flow)
        for follower in target.down:
            if follower.num_open < WINDOW:
                self._ask(follower)
