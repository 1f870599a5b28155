"""Transfers over shared links as a fluid model: max-min fair rates, and followers that are no faster than their source.
Idle transfers, which nothing waits for, take only the bandwidth that others leave.

A transfer has one stream per source that it follows at the same time. A source that is still receiving passes on what
it has, so a follower that is within one chunk of its source receives no faster than the source. Rates change only when
a transfer begins, ends, changes its sources or catches up, and only for transfers that share a link with it or follow
each other, directly or through others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from torchrelay.sim.events import Event, EventQueue

Link: TypeAlias = Hashable
NUM_CHUNKS = 256  # of a pack
_SLACK = 1e-9  # relative


@dataclass(eq=False, slots=True)
class Stream:
    """Bytes from one source over ``links``; ``upstream`` is the source's own transfer, unless it has the whole pack."""

    links: tuple[Link, ...]
    upstream: Transfer | None = None
    is_idle: bool = False  # takes only the bandwidth that others leave
    bytes_per_s: float = 0.0
    is_following: bool = False  # has caught up with a source that is still receiving, and keeps its rate


@dataclass(eq=False, slots=True)
class Transfer:
    num_bytes: float
    streams: Sequence[Stream]
    on_end: Callable[[], None]
    num_received: float = 0.0  # bytes, at time ``at``
    at: float = 0.0
    change: Event | None = None  # the transfer ends or catches up with a source

    @property
    def bytes_per_s(self) -> float:
        return sum(stream.bytes_per_s for stream in self.streams)

    @property
    def is_complete(self) -> bool:
        return self.num_received >= self.num_bytes * (1 - _SLACK)

    def advance(self, now: float) -> None:
        """Counts the bytes that have arrived by ``now``."""
        if now > self.at:
            self.num_received = min(self.num_received + self.bytes_per_s * (now - self.at), self.num_bytes)
            self.at = now

    def lag_bytes(self, stream: Stream) -> float:
        """Bytes that the stream's source has and the transfer lacks; infinite if the source has the whole pack."""
        return math.inf if stream.upstream is None else stream.upstream.num_received - self.num_received

    def follows(self, stream: Stream) -> bool:
        """Whether the transfer has caught up with a source that is still receiving and has not fallen two chunks behind
        since. Without this hysteresis, nearly equal rates would alternate at every change of any rate.
        """
        upstream = stream.upstream
        if upstream is None or upstream.is_complete:
            return False
        num_chunks = 2 if stream.is_following else 1
        stream.is_following = self.lag_bytes(stream) <= self._chunk_bytes * num_chunks * (1 + _SLACK)
        return stream.is_following

    @property
    def leader(self) -> Transfer | None:
        """The source with most bytes if the transfer has caught up with all of its sources; it limits the transfer."""
        if not all(map(self.follows, self.streams)):
            return None
        sources = (stream.upstream for stream in self.streams if stream.upstream is not None)
        return max(sources, key=lambda source: source.num_received, default=None)

    @property
    def _chunk_bytes(self) -> float:
        return self.num_bytes / NUM_CHUNKS

    def change_s(self) -> float:
        """Seconds until the transfer ends, catches up with a source, or falls behind one."""
        rate = self.bytes_per_s
        wait_s = (self.num_bytes - self.num_received) / rate if rate else math.inf
        for stream in self.streams:
            upstream = stream.upstream
            if upstream is None or upstream.is_complete:
                continue
            lag_bytes, gain = self.lag_bytes(stream), rate - upstream.bytes_per_s
            if gain > 0 and not stream.is_following:
                wait_s = min(wait_s, max(lag_bytes - self._chunk_bytes, 0.0) / gain)
            elif gain < 0 and stream.is_following:
                wait_s = min(wait_s, max(2 * self._chunk_bytes * (1 + 2 * _SLACK) - lag_bytes, 0.0) / -gain)
        return max(wait_s, 1e-9)


def fair_rates(demands: Sequence[tuple[tuple[Link, ...], float]], capacity: Mapping[Link, float]) -> list[float]:
    """Max-min fair rates of streams, each with its links and its own cap (Bertsekas and Gallager, *Data Networks*,
    6.5.2). A common level rises. A stream's rate is the level at which equal shares fill one of its links, or its cap.
    """
    rates = [math.inf] * len(demands)
    users: dict[Link, list[int]] = {}
    caps: list[tuple[float, int]] = []
    for number, (links, cap) in enumerate(demands):
        if cap < math.inf:
            caps.append((cap, number))
        elif not links:
            raise ValueError("a stream without a link must have a cap")
        for link in links:
            users.setdefault(link, []).append(number)
    caps.sort(reverse=True)
    left = {link: capacity[link] for link in users}
    num_active = {link: len(numbers) for link, numbers in users.items()}
    shares = [(left[link] / num, order, link) for order, (link, num) in enumerate(num_active.items())]
    heapq.heapify(shares)
    level = 0.0
    while shares or caps:
        if caps and (not shares or caps[-1][0] <= shares[0][0]):
            level = max(level, caps[-1][0])
            filled = [caps.pop()[1]]
        else:
            _, order, link = shares[0]
            num = num_active[link]
            share = left[link] / num if num else 0.0
            if num and share > shares[0][0] * (1 + _SLACK):  # other streams of the link got less than this
                heapq.heapreplace(shares, (share, order, link))
                continue
            heapq.heappop(shares)
            level = max(level, share)
            filled = users[link] if num else []
        for number in filled:
            if rates[number] < math.inf:
                continue
            rates[number] = min(level, demands[number][1])
            for link in demands[number][0]:
                left[link] = max(left[link] - rates[number], 0.0)
                num_active[link] -= 1
    return rates


def class_rates(streams: Sequence[Stream], caps: Sequence[float], capacity: Mapping[Link, float]) -> list[float]:
    """Fair rates of awaited streams, then of idle streams over the remaining bandwidth."""
    awaited_caps = [0.0 if stream.is_idle else cap for stream, cap in zip(streams, caps, strict=True)]
    awaited = fair_rates([(stream.links, cap) for stream, cap in zip(streams, awaited_caps, strict=True)], capacity)
    if not any(stream.is_idle for stream in streams):
        return awaited
    left = {link: capacity[link] for stream in streams for link in stream.links}
    for stream, rate in zip(streams, awaited, strict=True):
        for link in stream.links:
            left[link] = max(left[link] - rate, 0.0)
    idle_caps = [cap if stream.is_idle else 0.0 for stream, cap in zip(streams, caps, strict=True)]
    idle = fair_rates([(stream.links, cap) for stream, cap in zip(streams, idle_caps, strict=True)], left)
    return [awaited_rate + idle_rate for awaited_rate, idle_rate in zip(awaited, idle, strict=True)]


@dataclass(slots=True)
class FluidNetwork:
    """All transfers in progress. ``capacity`` is each link's bytes per second."""

    events: EventQueue
    capacity: Mapping[Link, float]
    _users: dict[Link, dict[Transfer, None]] = field(default_factory=dict)
    _followers: dict[Transfer, dict[Transfer, None]] = field(default_factory=dict)

    def begin(self, num_bytes: float, streams: Sequence[Stream], on_end: Callable[[], None]) -> Transfer:
        transfer = Transfer(num_bytes, streams, on_end, at=self.events.now)
        self._enter(transfer)
        self._settle([transfer])
        return transfer

    def redirect(self, transfer: Transfer, streams: Sequence[Stream]) -> None:
        """Replaces the transfer's sources; it keeps the bytes that it has."""
        touched = self._leave(transfer)
        transfer.streams = streams
        self._enter(transfer)
        self._settle([transfer, *touched])

    def abort(self, transfer: Transfer) -> None:
        self._settle(self._leave(transfer))

    def received(self, transfer: Transfer) -> float:
        """Bytes that the transfer has received by now."""
        transfer.advance(self.events.now)
        return transfer.num_received

    def _enter(self, transfer: Transfer) -> None:
        for stream in transfer.streams:
            for link in stream.links:
                self._users.setdefault(link, {})[transfer] = None
            if stream.upstream is not None and not stream.upstream.is_complete:
                self._followers.setdefault(stream.upstream, {})[transfer] = None

    def _leave(self, transfer: Transfer) -> list[Transfer]:
        """Removes the transfer from its links and sources now. Returns the transfers whose rates may change."""
        transfer.advance(self.events.now)
        if transfer.change is not None:
            transfer.change.cancel()
            transfer.change = None
        touched: dict[Transfer, None] = dict(self._followers.get(transfer, ()))
        for stream in transfer.streams:
            stream.bytes_per_s = 0.0
            for link in stream.links:
                if users := self._users.get(link):
                    users.pop(transfer, None)
                    touched |= users
                    if not users:
                        del self._users[link]
            if stream.upstream is not None and (followers := self._followers.get(stream.upstream)):
                followers.pop(transfer, None)
        return list(touched)

    def _settle(self, changed: Iterable[Transfer]) -> None:
        """Ends complete transfers, recomputes all rates that ``changed`` affects and schedules the next changes."""
        affected = self._affected(changed)
        ended = [transfer for transfer in affected if transfer.is_complete]
        for transfer in ended:
            self._leave(transfer)
            self._followers.pop(transfer, None)
            transfer.num_received = transfer.num_bytes
        self._share([transfer for transfer in affected if not transfer.is_complete])
        waiting = dict(affected)
        for transfer in affected:
            waiting |= self._followers.get(transfer, {})  # the time at which they catch up changes
        for transfer in waiting:
            if not transfer.is_complete:
                self._await_change(transfer)
        for transfer in ended:
            transfer.on_end()

    def _affected(self, changed: Iterable[Transfer]) -> dict[Transfer, None]:
        """These transfers and all whose rates depend on theirs, advanced to now."""
        now = self.events.now
        affected: dict[Transfer, None] = dict.fromkeys(changed)
        stack = list(affected)
        links: set[Link] = set()
        while stack:
            transfer = stack.pop()
            transfer.advance(now)
            others: dict[Transfer, None] = {}
            for stream in transfer.streams:
                for link in stream.links:
                    if link not in links:
                        links.add(link)
                        others |= self._users.get(link, {})
                upstream = stream.upstream
                if upstream is not None and not upstream.is_complete:
                    upstream.advance(now)
                    if transfer.follows(stream):
                        others[upstream] = None
            for follower in self._followers.get(transfer, ()):
                follower.advance(now)
                if any(stream.upstream is transfer and follower.follows(stream) for stream in follower.streams):
                    others[follower] = None
            new = [other for other in others if other not in affected]
            affected |= dict.fromkeys(new)
            stack += new
        return affected

    def _await_change(self, transfer: Transfer) -> None:
        transfer.advance(self.events.now)
        at = self.events.now + transfer.change_s()
        if transfer.change is not None:
            if abs(transfer.change.at - at) <= _SLACK:
                return
            transfer.change.cancel()
        transfer.change = None if math.isinf(at) else self.events.at(at, partial(self._changed, transfer))

    def _changed(self, transfer: Transfer) -> None:
        transfer.change = None
        self._settle([transfer])

    def _share(self, transfers: Sequence[Transfer]) -> None:
        """Computes max-min rates repeatedly, capping followers at their source's rate, until no cap is exceeded."""
        streams = [stream for transfer in transfers for stream in transfer.streams]
        caps = dict.fromkeys(streams, math.inf)
        leaders = [(transfer, leader) for transfer in transfers if (leader := transfer.leader) is not None]
        following = [
            (stream, source)
            for stream in streams
            if (source := stream.upstream) and not source.is_complete and stream.is_following
        ]
        for _ in range(len(transfers) + 1):
            rates = class_rates(streams, [caps[stream] for stream in streams], self.capacity)
            for stream, rate in zip(streams, rates, strict=True):
                stream.bytes_per_s = rate
            limits = {stream: upstream.bytes_per_s for stream, upstream in following}
            for transfer, leader in leaders:
                total = transfer.bytes_per_s
                for stream in transfer.streams:
                    part = stream.bytes_per_s / total if total else 0.0
                    limits[stream] = min(limits[stream], leader.bytes_per_s * part)
            exceeded = [stream for stream, limit in limits.items() if stream.bytes_per_s * (1 - 1e-6) > limit]
            if not exceeded:
                return
            for stream in exceeded:
                caps[stream] = min(caps[stream], limits[stream])
