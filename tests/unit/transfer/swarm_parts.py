"""Transfers in simulated time: sources of given rates, and the swarm that asks them. No sockets, no threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchrelay.transfer.lanes import Phase
from torchrelay.transfer.swarm import Rules, Swarm

STEP_S = 0.001
CHUNK_BYTES = 256 << 10


@dataclass
class SimulatedSource:
    """Sends what it is asked for, in order, at ``rate`` bytes per second; ``holds``: how many of the first chunks."""

    rate: float
    holds: int = 1 << 30
    opens_in_s: float = 0.001
    pending: list[int] = field(default_factory=list)
    brought: list[int] = field(default_factory=list)
    _told: int = 0
    _sending: int | None = None
    _writes: bool = False
    _left: float = 0.0

    def step(self, number: int, swarm: Swarm, now: float) -> None:
        lane = swarm.lanes[number]
        if lane.phase is Phase.OPENING and now - lane.since >= self.opens_in_s and self.rate:
            swarm.opened(number, now)
            self._told = 0
        if lane.phase is not Phase.OPEN:
            return
        held = min(self.holds, len(lane.has))
        if held > self._told:
            swarm.gained(number, range(self._told, held), now)
            self._told = held
        if self._writes and swarm.release_revoked(number, now):
            self._writes = False
        budget = self.rate * STEP_S
        while budget > 0:
            if self._sending is None and not self._begin(number, swarm, now, held):
                if self.pending and self.rate:
                    swarm.heard(number, now)  # it lives
                return
            passed = min(budget, self._left)
            budget, self._left = budget - passed, self._left - passed
            swarm.progress(number, int(passed), now)
            if self._left < 1:
                if self._writes and self._sending is not None:
                    swarm.accepted(number, self._sending, CHUNK_BYTES, now)
                    self.brought.append(self._sending)
                self._sending = None

    def _begin(self, number: int, swarm: Swarm, now: float, held: int) -> bool:
        place = next((place for place in self.pending if place < held), None)
        if place is None:
            return False
        self.pending.remove(place)
        self._sending, self._left = place, CHUNK_BYTES
        self._writes = swarm.begin(number, place, now)
        return True


def transfer(
    sources: list[SimulatedSource],
    num_chunks: int,
    rules: Rules | None = None,
    at: Callable[[float, Swarm], None] = lambda now, swarm: None,
    limit_s: float = 60.0,
) -> tuple[Swarm, float]:
    """Runs until all chunks are there; ``at`` is called at every step. Returns the swarm and how long it took."""
    swarm = Swarm(num_chunks, len(sources), rules or Rules())
    step = 0
    while swarm.num_left:
        now = step * STEP_S
        assert now < limit_s, "the transfer does not end"
        at(now, swarm)
        if step % 20 == 0:
            swarm.review(now)
        for number, source in enumerate(sources):
            source.step(number, swarm, now)
        for number, source in enumerate(sources):
            if swarm.lanes[number].phase is Phase.OPEN:
                orders = swarm.orders(number)
                swarm.ask(number, orders.wanted, now)
                source.pending = [place for place in source.pending if place not in orders.cancelled]
                source.pending += orders.wanted
        step += 1
    return swarm, step * STEP_S
