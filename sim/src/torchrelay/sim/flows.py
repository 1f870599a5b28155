"""Transfers over shared links, as fluid: max-min fair rates, and followers that go no faster than what they follow.
What nobody waits for takes only what others leave.

A transfer has one stream per source that it follows at once. A source that is itself still receiving passes on what it
has: a follower that has caught up with it (but for one chunk) receives no faster than it does. Rates change only when a
transfer begins, ends, gets other sources or catches up; and only of those that share a link with it, or follow each
other, directly or through others.
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
_NUM_CHUNKS = 256  # of a pack
_SLACK = 1e-9  # relative


@dataclass(eq=False, slots=True)
class Stream:
    """From one source: over these links, and behind ``upstream`` if the source is still receiving."""

    links: tuple[Link, ...]
    upstream: Transfer | None = None
    is_idle: bool = False  # nobody waits for it: it takes only what others leave of its links
    bytes_per_s: float = 0.0
    is_behind: bool = False  # it has caught up with a source that is still receiving, and keeps its pace


@dataclass(eq=False, slots=True)
class Transfer:
    num_bytes: float
    streams: Sequence[Stream]
    on_end: Callable[[], None]
    num_received: float = 0.0  # at ``at``
    at: float = 0.0
    change: Event | None = None  # it ends then, or catches up with a source

    @property
    def bytes_per_s(self) -> float:
        return sum(stream.bytes_per_s for stream in self.streams)

    @property
    def is_complete(self) -> bool:
        return self.num_received >= self.num_bytes * (1 - _SLACK)

    def advance(self, now: float) -> None:
        """Counts what has arrived by now."""
        if now > self.at:
            self.num_received = min(self.num_received + self.bytes_per_s * (now - self.at), self.num_bytes)
            self.at = now

    def lag_bytes(self, stream: Stream) -> float:
        """How far the transfer is behind the stream's source."""
        return math.inf if stream.upstream is None else stream.upstream.num_received - self.num_received

    def follows(self, stream: Stream) -> bool:
        """Whether it has caught up with a source that is still receiving, and has not fallen two chunks behind since:
        paces that differ by little would else take turns at every change of any rate.
        """
        upstream = stream.upstream
        if upstream is None or upstream.is_complete:
            return False
        num_chunks = 2 if stream.is_behind else 1
        stream.is_behind = self.lag_bytes(stream) <= self._chunk_bytes * num_chunks * (1 + _SLACK)
        return stream.is_behind

    @property
    def leader(self) -> Transfer | None:
        """The source that has most, if it has caught up with all of them: as a whole it goes no faster than that."""
        if not all(map(self.follows, self.streams)):
            return None
        sources = (stream.upstream for stream in self.streams if stream.upstream is not None)
        return max(sources, key=lambda source: source.num_received, default=None)

    @property
    def _chunk_bytes(self) -> float:
        return self.num_bytes / _NUM_CHUNKS

    def change_s(self) -> float:
        """Until it ends, catches up with a source, or falls behind one."""
        rate = self.bytes_per_s
        wait_s = (self.num_bytes - self.num_received) / rate if rate else math.inf
        for stream in self.streams:
            upstream = stream.upstream
            if upstream is None or upstream.is_complete:
                continue
            lag_bytes, gain = self.lag_bytes(stream), rate - upstream.bytes_per_s
            if gain > 0 and not stream.is_behind:
                wait_s = min(wait_s, max(lag_bytes - self._chunk_bytes, 0.0) / gain)
            elif gain < 0 and stream.is_behind:
                wait_s = min(wait_s, max(2 * self._chunk_bytes * (1 + 2 * _SLACK) - lag_bytes, 0.0) / -gain)
        return max(wait_s, 1e-9)


def fair_rates(demands: Sequence[tuple[tuple[Link, ...], float]], capacity: Mapping[Link, float]) -> list[float]:
    """Max-min fair rates of streams, each with its links and its own cap (Bertsekas and Gallager, *Data Networks*,
    6.5.2): a common level rises; it is the rate of the streams of a link when their equal shares fill it, and of a
    stream when it is its cap.
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
            if num and share > shares[0][0] * (1 + _SLACK):  # others of its streams got less: more is left
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
    """Fair rates of what somebody waits for, and then of idle streams over what that leaves."""
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
    return [one + other for one, other in zip(awaited, idle, strict=True)]


@dataclass(slots=True)
class FluidNetwork:
    """All transfers under way. ``capacity``: bytes per second of each link, which may be changed with ``set``."""

    events: EventQueue
    capacity: dict[Link, float]
    _users: dict[Link, dict[Transfer, None]] = field(default_factory=dict)
    _followers: dict[Transfer, dict[Transfer, None]] = field(default_factory=dict)

    def begin(self, num_bytes: float, streams: Sequence[Stream], on_end: Callable[[], None]) -> Transfer:
        transfer = Transfer(num_bytes, streams, on_end, at=self.events.now)
        self._enter(transfer)
        self._settle([transfer])
        return transfer

    def redirect(self, transfer: Transfer, streams: Sequence[Stream]) -> None:
        """The transfer keeps what it has, and follows others."""
        touched = self._leave(transfer)
        transfer.streams = streams
        self._enter(transfer)
        self._settle([transfer, *touched])

    def abort(self, transfer: Transfer) -> None:
        self._settle(self._leave(transfer))

    def set(self, link: Link, bytes_per_s: float) -> None:
        """The link's capacity changes."""
        self.capacity[link] = bytes_per_s
        self._settle(self._users.get(link, ()))

    def received(self, transfer: Transfer) -> float:
        """Bytes that have arrived by now."""
        transfer.advance(self.events.now)
        return transfer.num_received

    def _enter(self, transfer: Transfer) -> None:
        for stream in transfer.streams:
            for link in stream.links:
                self._users.setdefault(link, {})[transfer] = None
            if stream.upstream is not None and not stream.upstream.is_complete:
                self._followers.setdefault(stream.upstream, {})[transfer] = None

    def _leave(self, transfer: Transfer) -> list[Transfer]:
        """From its links and sources, as of now. Returns those whose rates may change by it."""
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
        """Ends what is complete, shares anew the links of all that these concern, and waits for the next changes."""
        concerned = self._concerned(changed)
        ended = [transfer for transfer in concerned if transfer.is_complete]
        for transfer in ended:
            self._leave(transfer)
            self._followers.pop(transfer, None)
            transfer.num_received = transfer.num_bytes
        self._share([transfer for transfer in concerned if not transfer.is_complete])
        waiting = dict(concerned)
        for transfer in concerned:
            waiting |= self._followers.get(transfer, {})  # they catch up at another time
        for transfer in waiting:
            if not transfer.is_complete:
                self._await_change(transfer)
        for transfer in ended:
            transfer.on_end()

    def _concerned(self, changed: Iterable[Transfer]) -> dict[Transfer, None]:
        """These, and all whose rates depend on theirs; as of now."""
        now = self.events.now
        found: dict[Transfer, None] = dict.fromkeys(changed)
        stack = list(found)
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
            new = [other for other in others if other not in found]
            found |= dict.fromkeys(new)
            stack += new
        return found

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
        """Max-min rates; then again with what follows capped at the rate of what it follows, until nothing changes."""
        streams = [stream for transfer in transfers for stream in transfer.streams]
        caps = dict.fromkeys(streams, math.inf)
        leaders = [(transfer, leader) for transfer in transfers if (leader := transfer.leader) is not None]
        behind = [(stream, stream.upstream) for stream in streams if stream.upstream is not None and stream.is_behind]
        for _ in range(len(transfers) + 1):
            rates = class_rates(streams, [caps[stream] for stream in streams], self.capacity)
            for stream, rate in zip(streams, rates, strict=True):
                stream.bytes_per_s = rate
            limits = {stream: upstream.bytes_per_s for stream, upstream in behind}
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
