"""Suspicion, joining, standby, windows and stealing, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.transfer.fetch.chunk_assignment import MAX_WINDOW, MIN_WINDOW, ChunkAssignment
from torchrelay.transfer.fetch.source_policy import MAX_FAILURES, SourcePolicy
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


RATE = 50e6
NUM_CHUNKS = 256
UNDISTURBED_S = NUM_CHUNKS * CHUNK_BYTES / RATE  # 1.34


class Pair:
    """A source of full rate and its alternate, and the time at which the alternate has joined."""

    def __init__(self, alternate_rate: float = RATE, holds: int = 1 << 30) -> None:
        self.first, self.second = SimulatedSource(RATE, holds=holds), SimulatedSource(alternate_rate)
        self.joined_at_s: float | None = None

    def changed(
        self, from_s: float = math.inf, share: float = 1.0, until_s: float = math.inf
    ) -> Callable[[float, TransferCore], None]:
        """The first source delivers ``share`` of its rate for a while."""

        def at(now: float, core: TransferCore) -> None:
            self.first.rate = RATE * (share if from_s < now < until_s else 1.0)
            if core.states[1].phase is SourcePhase.OPEN and self.joined_at_s is None:
                self.joined_at_s = now

        return at


def test_healthy_source_needs_no_alternate() -> None:
    pair = Pair()
    core, took_s = transfer([pair.first, pair.second], NUM_CHUNKS)
    assert pair.first.received == list(range(NUM_CHUNKS))
    assert (pair.second.received, core.policy.num_repairs) == ([], 0)
    assert took_s < 1.03 * UNDISTURBED_S


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_striped_sources_deliver_full_rate_whatever_their_shares(share: float) -> None:
    sources = [SimulatedSource(RATE * (1 - share)), SimulatedSource(RATE * share)]
    _, took_s = transfer(sources, NUM_CHUNKS, num_striped=2)
    assert took_s < 1.08 * UNDISTURBED_S
    assert len(sources[1].received) >= 0.4 * share * NUM_CHUNKS


def test_slow_source_gets_helper_and_continues() -> None:
    pair = Pair(RATE * 0.75)
    core, took_s = transfer([pair.first, pair.second], NUM_CHUNKS, pair.changed(0.7, 0.25))
    assert pair.joined_at_s is not None and 0.8 < pair.joined_at_s < 1.0
    assert took_s < 1.2 * UNDISTURBED_S
    assert core.policy.num_repairs == 1
    assert len(pair.first.received) > 0.5 * NUM_CHUNKS


def test_idle_transfer_does_not_hedge() -> None:
    pair = Pair()
    core, _ = transfer([pair.first, pair.second], NUM_CHUNKS, pair.changed(0.5, 0.25), hedge_slow=False)
    assert (len(pair.second.received), core.policy.num_repairs) == (0, 0)


def test_silent_source_replaced_within_200_ms() -> None:
    pair = Pair()
    core, took_s = transfer([pair.first, pair.second], NUM_CHUNKS, pair.changed(0.7, 0.0))
    assert took_s < UNDISTURBED_S + 0.22
    assert core.policy.num_repairs == 1


def test_recovered_source_puts_helper_on_standby() -> None:
    pair = Pair()
    core, _ = transfer([pair.first, pair.second], 3 * NUM_CHUNKS, pair.changed(0.5, 0.0, until_s=0.8))
    assert core.states[1].standby
    assert len(pair.second.received) < 0.5 * NUM_CHUNKS


def test_probation_doubles_after_each_relapse() -> None:
    pair = Pair()
    core, took_s = transfer([pair.first, pair.second], 10 * NUM_CHUNKS, pair.changed(0.7, 0.55))
    assert core.policy.num_repairs <= 6
    assert took_s < 0.75 * 10 * UNDISTURBED_S


def test_source_without_data_gets_half_a_second() -> None:
    pair = Pair(holds=10)
    transfer([pair.first, pair.second], 60, pair.changed())
    assert pair.joined_at_s is not None and 0.5 < pair.joined_at_s < 0.65
    assert pair.first.received == list(range(10))


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(2e6, 1, MIN_WINDOW), (RATE, 5, 12), (5e9, MAX_WINDOW, MAX_WINDOW)]
)
def test_windows_follow_rate(rate: float, least: int, most: int) -> None:
    sizes = [0]

    def look(now: float, core: TransferCore) -> None:
        if now > 0.2:
            sizes.append(len(core.states[0].outstanding))

    transfer([SimulatedSource(rate)], int(rate / CHUNK_BYTES / 2) + 4, at=look)
    assert least <= max(sizes) <= most


def test_missing_chunks_are_requested_from_other_source() -> None:
    first, second = SimulatedSource(RATE / 2, holds=40), SimulatedSource(RATE / 2)
    transfer([first, second], 80, num_striped=2)
    assert len(first.received) >= 15 and max(first.received) < 40


def test_chunk_is_written_by_one_source_and_cancelled_at_the_others() -> None:
    core = opened(2, 2, num_striped=2)
    first, second = core.assignment.requests(0).wanted, core.assignment.requests(1).wanted
    assert (first, second) == ([0, 1], [])
    core.assignment.ask(0, first, 0.0)
    core.assignment.ask(1, [1], 0.0)  # as after a steal
    assert core.assignment.begin(0, 1, 0.1)
    assert core.assignment.requests(1).cancelled == [1]
    assert not core.assignment.begin(1, 1, 0.1), "the other source writes it"
    core.assignment.accepted(0, 1, 10, 0.1)
    assert not core.assignment.begin(1, 1, 0.2), "it is here"
    assert core.assignment.num_left == 1


def test_chunks_of_failed_source_requested_from_next() -> None:
    core = opened(4, 2)
    wanted = core.assignment.requests(0).wanted
    core.assignment.ask(0, wanted, 0.0)
    assert core.assignment.begin(0, wanted[0], 0.0)
    core.policy.failed(0, final=False)
    assert core.policy.review(0.0) == [1]
    core.policy.opened(1, 0.0)
    core.policy.gained(1, range(4), 0.0)
    assert core.assignment.requests(1).wanted == wanted
    assert core.policy.num_repairs == 1


def test_refusals_are_final_and_failures_are_bounded() -> None:
    core = TransferCore(3, 2)
    assert core.policy.review(0.0) == [0]
    core.policy.failed(0, final=True)
    assert core.policy.review(0.0) == [1]
    core.policy.failed(1, final=False)
    assert core.policy.review(0.0) == [1]
    assert not core.policy.exhausted
    core.policy.failed(1, final=False)
    assert core.policy.exhausted
    assert core.policy.review(0.0) == []
    assert TransferCore(3, 0).policy.exhausted


def test_source_overdue_after_time_limits() -> None:
    core = opened(3, 1)
    assert core.policy.overdue(0, 5.0, 10.0, 100.0) == ""  # nothing is due
    core.assignment.ask(0, [0], 100.0)
    assert core.policy.overdue(0, 5.0, 10.0, 104.0) == ""
    assert "nothing was received for 5 s" in core.policy.overdue(0, 5.0, 10.0, 106.0)
    starving = TransferCore(3, 1)
    starving.policy.review(0.0)
    starving.policy.opened(0, 0.0)
    starving.assignment.ask(0, [0], 0.0)
    starving.policy.frame_received(0, 11.0)
    assert "nothing to send for 10 s" in starving.policy.overdue(0, 5.0, 10.0, 11.0)


@settings(max_examples=25, deadline=None)
@given(
    rates=st.lists(st.sampled_from([5e6, 20e6, 50e6, 200e6]), min_size=1, max_size=4),
    num_striped=st.integers(1, 3),
    changes=st.lists(
        st.tuples(
            st.floats(0.0, 1.5), st.integers(0, 3), st.sampled_from(["silent", "slow", "fail", "back", "reopen"])
        ),
        max_size=6,
    ),
)
def test_each_chunk_accepted_once(rates: list[float], num_striped: int, changes: list[tuple[float, int, str]]) -> None:
    """The last source never fails: so all chunks come, each written by one source."""
    sources = [SimulatedSource(rate) for rate in rates]
    todo = sorted(changes)

    def change(now: float, core: TransferCore) -> None:
        while todo and todo[0][0] <= now:
            _, number, kind = todo.pop(0)
            if number >= len(sources) - 1:
                continue
            if kind in ("fail", "reopen") and core.states[number].phase is SourcePhase.OPEN:
                if kind == "fail":
                    core.policy.failed(number, final=False)
                else:
                    core.policy.reopening(number, now)
                sources[number] = SimulatedSource(rates[number], received=sources[number].received)
            else:
                sources[number].rate = {"silent": 0.0, "slow": rates[number] / 5}.get(kind, rates[number])

    core, _ = transfer(sources, 60, change, num_striped=num_striped)
    assert sorted(place for source in sources for place in source.received) == list(range(60))
    assert all(state.num_failures <= MAX_FAILURES for state in core.states)
