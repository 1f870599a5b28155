"""Transfers over shared links, as fluid: max-min fair rates, and followers that go no faster than what they follow.
What nobody waits for takes only what others leave.

A transfer has one stream per source that it follows at once. A source that is itself still receiving passes on what it
has: a follower that has caught up with it (but for one chunk) receives no faster than it does. Rates change only when a
transfer begins, ends, gets other sources or catches up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False, slots=True)
class Transfer:
    num_bytes: float
    streams: Sequence[Stream]
    on_end: Callable[[], None]
    num_received: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return sum(stream.bytes_per_s for stream in self.streams)

    @property
    def is_complete(self) -> bool:
        return self.num_received >= self.num_bytes * (1 - _SLACK)

    def lag_bytes(self, stream: Stream) -> float:
        """How far the transfer is behind the stream's source."""
        return math.inf if stream.upstream is None else stream.upstream.num_received - self.num_received

    def follows(self, stream: Stream) -> bool:
        """Whether it has caught up with a source that is still receiving."""
        upstream = stream.upstream
        if upstream is None or upstream.is_complete:
            return False
        return self.lag_bytes(stream) <= self.num_bytes / _NUM_CHUNKS * (1 + _SLACK)


def fair_rates(demands: Sequence[tuple[tuple[Link, ...], float]], capacity: Mapping[Link, float]) -> list[float]:
    """Max-min fair rates of streams, each with its links and its own cap, by progressive filling (Bertsekas and
    Gallager, *Data Networks*, 6.5.2).
    """
    rates = [0.0] * len(demands)
    left = {link: capacity[link] for links, _ in demands for link in links}
    active = {number for number, (_, cap) in enumerate(demands) if cap > 0}
    while active:
        users: dict[Link, int] = {}
        for number in active:
            for link in demands[number][0]:
                users[link] = users.get(link, 0) + 1
        step = min((left[link] / num for link, num in users.items()), default=math.inf)
        step = max(min(step, min(demands[number][1] - rates[number] for number in active)), 0.0)
        if math.isinf(step):
            raise ValueError("a stream without a link must have a cap")
        for number in active:
            rates[number] += step
        for link, num in users.items():
            left[link] -= step * num
        full = {link for link in users if left[link] <= _SLACK * capacity[link]}
        active -= {
            number
            for number in active
            if rates[number] >= demands[number][1] * (1 - _SLACK) or not full.isdisjoint(demands[number][0])
        }
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
    _transfers: dict[Transfer, None] = field(default_factory=dict)
    _at: float = 0.0
    _next: Event | None = None

    def begin(self, num_bytes: float, streams: Sequence[Stream], on_end: Callable[[], None]) -> Transfer:
        transfer = Transfer(num_bytes, streams, on_end)
        self._advance()
        self._transfers[transfer] = None
        self._settle()
        return transfer

    def redirect(self, transfer: Transfer, streams: Sequence[Stream]) -> None:
        """The transfer keeps what it has, and follows others."""
        self._advance()
        transfer.streams = streams
        self._settle()

    def abort(self, transfer: Transfer) -> None:
        self._advance()
        self._transfers.pop(transfer, None)
        self._settle()

    def set(self, link: Link, bytes_per_s: float) -> None:
        """The link's capacity changes."""
        self._advance()
        self.capacity[link] = bytes_per_s
        self._settle()

    def received(self, transfer: Transfer) -> float:
        """Bytes that have arrived by now."""
        self._advance()
        return transfer.num_received

    def _advance(self) -> None:
        passed_s, self._at = self.events.now - self._at, self.events.now
        if passed_s > 0:
            for transfer in self._transfers:
                transfer.num_received = min(transfer.num_received + transfer.bytes_per_s * passed_s, transfer.num_bytes)

    def _settle(self) -> None:
        """Ends what is complete, shares the links anew, and waits for the next change."""
        ended = [transfer for transfer in self._transfers if transfer.is_complete]
        for transfer in ended:
            del self._transfers[transfer]
        self._share()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._transfers:
            wait_s = min(self._change_s(transfer) for transfer in self._transfers)
            if not math.isinf(wait_s):
                self._next = self.events.after(wait_s, self._changed)
        for transfer in ended:
            transfer.num_received = transfer.num_bytes
            transfer.on_end()

    def _changed(self) -> None:
        self._next = None
        self._advance()
        self._settle()

    def _share(self) -> None:
        """Max-min rates; then again with what follows capped at the rate of what it follows, until nothing changes."""
        streams = [(transfer, stream) for transfer in self._transfers for stream in transfer.streams]
        caps = [math.inf] * len(streams)
        for _ in range(len(self._transfers) + 1):
            rates = class_rates([stream for _, stream in streams], caps, self.capacity)
            for (_, stream), rate in zip(streams, rates, strict=True):
                stream.bytes_per_s = rate
            limits = [
                s.upstream.bytes_per_s / len(t.streams) if s.upstream is not None and t.follows(s) else math.inf
                for t, s in streams
            ]
            if all(limit >= rate * (1 - 1e-6) for limit, rate in zip(limits, rates, strict=True)):
                return
            caps = [min(cap, limit) for cap, limit in zip(caps, limits, strict=True)]

    def _change_s(self, transfer: Transfer) -> float:
        """Until the transfer ends, or catches up with a source."""
        rate = transfer.bytes_per_s
        if not rate:
            return math.inf
        wait_s = (transfer.num_bytes - transfer.num_received) / rate
        for stream in transfer.streams:
            upstream = stream.upstream
            if upstream is None or upstream.is_complete or transfer.follows(stream) or upstream.bytes_per_s >= rate:
                continue
            gap = transfer.lag_bytes(stream) - transfer.num_bytes / _NUM_CHUNKS
            wait_s = min(wait_s, max(gap, 0.0) / (rate - upstream.bytes_per_s))
        return max(wait_s, 1e-9)
