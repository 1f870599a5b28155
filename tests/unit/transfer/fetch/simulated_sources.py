"""Transfers in simulated time: sources of given rates, and the pure core that asks them. No sockets, no threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchrelay.transfer.fetch.chunk_assignment import ChunkAssignment
from torchrelay.transfer.fetch.source_policy import SourcePolicy
from torchrelay.transfer.fetch.source_state import SourcePhase, SourceState

STEP_S = 0.001
CHUNK_BYTES = 256 << 10


class TransferCore:
    """The pure core of one transfer, composed as ``MultiSourceFetch`` composes it."""

    def __init__(self, num_chunks: int, num_sources: int, num_striped: int = 1, hedge_slow: bool = True) -> None:
        self.states = [SourceState() for _ in range(num_sources)]
        self.assignment = ChunkAssignment(num_chunks, self.states)
        self.policy = SourcePolicy(self.states, self.assignment, num_striped, hedge_slow)


def opened(num_chunks: int, num_sources: int, num_striped: int = 1) -> TransferCore:
    """A transfer whose first sources are open and have everything."""
    core = TransferCore(num_chunks, num_sources, num_striped)
    for number in core.policy.review(0.0):
        core.policy.opened(number, 0.0)
        core.policy.gained(number, range(num_chunks), 0.0)
    return core


@dataclass
class SimulatedSource:
    """Sends what is requested, in order, at ``rate`` bytes per second; ``holds``: how many leading chunks it has."""

    rate: float
    holds: int = 1 << 30
    opens_in_s: float = 0.001
    pending: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    _announced: int = 0
    _sending: int | None = None
    _writes: bool = False
    _left: float = 0.0

    def step(self, number: int, core: TransferCore, now: float) -> None:
        state = core.states[number]
        if state.phase is SourcePhase.OPENING and now - state.since >= self.opens_in_s and self.rate:
            core.policy.opened(number, now)
            self._announced = 0
        if state.phase is not SourcePhase.OPEN:
            return
        held = min(self.holds, len(state.has))
        if held > self._announced:
            core.policy.gained(number, range(self._announced, held), now)
            self._announced = held
        if self._writes and core.assignment.release_revoked(number, now):
            self._writes = False
        budget = self.rate * STEP_S
        while budget > 0:
            if self._sending is None and not self._begin(number, core, now, held):
                if self.pending and self.rate:
                    core.policy.frame_received(number, now)  # alive
                return
            num_bytes = min(budget, self._left)
            budget, self._left = budget - num_bytes, self._left - num_bytes
            core.assignment.record(core.states[number], int(num_bytes), now)
            if self._left < 1:
                if self._writes and self._sending is not None:
                    core.assignment.accepted(number, self._sending, CHUNK_BYTES, now)
                    self.received.append(self._sending)
                self._sending = None

    def _begin(self, number: int, core: TransferCore, now: float, held: int) -> bool:
        place = next((place for place in self.pending if place < held), None)
        if place is None:
            return False
        self.pending.remove(place)
        self._sending, self._left = place, CHUNK_BYTES
        self._writes = core.assignment.begin(number, place, now)
        return True


def transfer(
    sources: list[SimulatedSource],
    num_chunks: int,
    at: Callable[[float, TransferCore], None] = lambda now, core: None,
    *,
    num_striped: int = 1,
    hedge_slow: bool = True,
    limit_s: float = 60.0,
) -> tuple[TransferCore, float]:
    """Runs until all chunks are there; ``at`` is called at every step. Returns the core and how long it took."""
    core = TransferCore(num_chunks, len(sources), num_striped, hedge_slow)
    step = 0
    while core.assignment.num_left:
        now = step * STEP_S
        assert now < limit_s, "the transfer does not end"
        at(now, core)
        if step % 20 == 0:
            core.policy.review(now)
        for number, source in enumerate(sources):
            source.step(number, core, now)
        for number, source in enumerate(sources):
            if core.states[number].phase is SourcePhase.OPEN:
                requests = core.assignment.requests(number)
                core.assignment.ask(number, requests.wanted, now)
                source.pending = [place for place in source.pending if place not in requests.cancelled]
                source.pending += requests.wanted
        step += 1
    return core, step * STEP_S
