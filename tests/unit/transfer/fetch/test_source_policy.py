"""Suspicion, joining and standby, in simulated time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transfer.fetch.simulated_sources import CHUNK_BYTES, SimulatedSource, TransferCore, opened, transfer
from torchrelay.transfer.fetch.source_policy import MAX_FAILURES
from torchrelay.transfer.fetch.source_state import SourcePhase

RATE = 50e6
NUM_CHUNKS = 256
UNDISTURBED_S = NUM_CHUNKS * CHUNK_BYTES / RATE  # 1.34


def test_healthy_source_needs_no_alternate() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)
    core, took_s = transfer([first, second], NUM_CHUNKS)
    assert first.received == list(range(NUM_CHUNKS))
    assert second.received == []
    assert core.policy.num_repairs == 0
    assert took_s < 1.03 * UNDISTURBED_S


def test_two_half_rate_sources_deliver_full_rate() -> None:
    sources = [SimulatedSource(RATE / 2), SimulatedSource(RATE / 2)]
    _, took_s = transfer(sources, NUM_CHUNKS, num_striped=2)
    assert took_s < 1.05 * UNDISTURBED_S
    assert sorted(sources[0].received + sources[1].received) == list(range(NUM_CHUNKS))


def test_slow_source_gets_helper_and_continues() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE * 0.75)
    joined_at: list[float] = []

    def slow_down(now: float, core: TransferCore) -> None:
        if now > 0.7:
            first.rate = RATE / 4
        if core.states[1].phase is SourcePhase.OPEN and not joined_at:
            joined_at.append(now)

    core, took_s = transfer([first, second], NUM_CHUNKS, at=slow_down)
    assert 0.8 < joined_at[0] < 1.0
    assert took_s < 1.2 * UNDISTURBED_S
    assert core.policy.num_repairs == 1
    assert len(first.received) > 0.5 * NUM_CHUNKS


def test_idle_transfer_does_not_hedge() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def slow_down(now: float, core: TransferCore) -> None:
        first.rate = RATE if now < 0.5 else RATE / 4

    core, _ = transfer([first, second], NUM_CHUNKS, slow_down, hedge_slow=False)
    assert (len(second.received), core.policy.num_repairs) == (0, 0)


def test_silent_source_replaced_within_200_ms() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def fall_silent(now: float, core: TransferCore) -> None:
        first.rate = RATE if now < 0.7 else 0.0

    core, took_s = transfer([first, second], NUM_CHUNKS, at=fall_silent)
    assert took_s < UNDISTURBED_S + 0.22
    assert core.policy.num_repairs == 1


def test_recovered_source_puts_helper_on_standby() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def hiccup(now: float, core: TransferCore) -> None:
        first.rate = 0.0 if 0.5 < now < 0.8 else RATE

    core, _ = transfer([first, second], 3 * NUM_CHUNKS, at=hiccup)
    assert core.states[1].standby
    assert len(second.received) < 0.5 * NUM_CHUNKS
    assert len(first.received) + len(second.received) == 3 * NUM_CHUNKS


def test_probation_doubles_after_each_relapse() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def slow_down(now: float, core: TransferCore) -> None:
        first.rate = RATE if now < 0.7 else 0.55 * RATE

    core, took_s = transfer([first, second], 10 * NUM_CHUNKS, at=slow_down)
    assert core.policy.num_repairs <= 6
    assert took_s < 0.75 * 10 * UNDISTURBED_S


def test_source_without_data_gets_half_a_second() -> None:
    first, second = SimulatedSource(RATE, holds=10), SimulatedSource(RATE)
    joined_at: list[float] = []

    def look(now: float, core: TransferCore) -> None:
        if core.states[1].phase is SourcePhase.OPEN and not joined_at:
            joined_at.append(now)

    transfer([first, second], 60, at=look)
    assert 0.5 < joined_at[0] < 0.65
    assert first.received == list(range(10))


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
