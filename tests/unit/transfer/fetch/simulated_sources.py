"""Transfers in simulated time: sources of given rates, and the swarm that asks them. No sockets, no threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchrelay.transfer.fetch.source_policy import SourcePolicy, SourceRules
from torchrelay.transfer.fetch.source_state import SourcePhase

STEP_S = 0.001
CHUNK_BYTES = 256 << 10


@dataclass
class SimulatedSource:
    """Sends what it is asked for, in order, at ``rate`` bytes per second; ``holds``: how many of the first chunks."""

    rate: float
    holds: int = 1 << 30
    opens_in_s: float = 0.001
    pending: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    _told: int = 0
    _sending: int | None = None
    _writes: bool = False
    _left: float = 0.0

    def step(self, number: int, policy: SourcePolicy, now: float) -> None:
        state = policy.states[number]
        if state.phase is SourcePhase.OPENING and now - state.since >= self.opens_in_s and self.rate:
            policy.opened(number, now)
            self._told = 0
        if state.phase is not SourcePhase.OPEN:
            return
        held = min(self.holds, len(state.has))
        if held > self._told:
            policy.gained(number, range(self._told, held), now)
            self._told = held
        if self._writes and policy.release_revoked(number, now):
            self._writes = False
        budget = self.rate * STEP_S
        while budget > 0:
            if self._sending is None and not self._begin(number, policy, now, held):
                if self.pending and self.rate:
                    policy.frame_received(number, now)  # it lives
                return
            passed = min(budget, self._left)
            budget, self._left = budget - passed, self._left - passed
            policy.progress(number, int(passed), now)
            if self._left < 1:
                if self._writes and self._sending is not None:
                    policy.accepted(number, self._sending, CHUNK_BYTES, now)
                    self.received.append(self._sending)
                self._sending = None

    def _begin(self, number: int, policy: SourcePolicy, now: float, held: int) -> bool:
        place = next((place for place in self.pending if place < held), None)
        if place is None:
            return False
        self.pending.remove(place)
        self._sending, self._left = place, CHUNK_BYTES
        self._writes = policy.begin(number, place, now)
        return True


def transfer(
    sources: list[SimulatedSource],
    num_chunks: int,
    rules: SourceRules | None = None,
    at: Callable[[float, SourcePolicy], None] = lambda now, policy: None,
    limit_s: float = 60.0,
) -> tuple[SourcePolicy, float]:
    """Runs until all chunks are there; ``at`` is called at every step. Returns the swarm and how long it took."""
    policy = SourcePolicy(num_chunks, len(sources), rules or SourceRules())
    step = 0
    while policy.num_left:
        now = step * STEP_S
        assert now < limit_s, "the transfer does not end"
        at(now, policy)
        if step % 20 == 0:
            policy.review(now)
        for number, source in enumerate(sources):
            source.step(number, policy, now)
        for number, source in enumerate(sources):
            if policy.states[number].phase is SourcePhase.OPEN:
                requests = policy.requests(number)
                policy.ask(number, requests.wanted, now)
                source.pending = [place for place in source.pending if place not in requests.cancelled]
                source.pending += requests.wanted
        step += 1
    return policy, step * STEP_S
