"""The decisions of a transfer, in simulated time: order, windows, striping, doubt, joining, resting, stealing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transfer.fetch.simulated_sources import CHUNK_BYTES, SimulatedSource, transfer
from torchrelay.transfer.fetch.chunk_assignment import MAX_WINDOW, MIN_WINDOW
from torchrelay.transfer.fetch.source_policy import MAX_FAILURES, SourcePolicy, SourceRules
from torchrelay.transfer.fetch.source_state import SourcePhase

RATE = 50e6
NUM_CHUNKS = 256
UNDISTURBED_S = NUM_CHUNKS * CHUNK_BYTES / RATE  # 1.34


def opened(num_chunks: int, num_sources: int, num_striped: int = 1) -> SourcePolicy:
    """A swarm whose first sources are open and have everything."""
    policy = SourcePolicy(num_chunks, num_sources, SourceRules(num_striped))
    for number in policy.review(0.0):
        policy.opened(number, 0.0)
        policy.gained(number, range(num_chunks), 0.0)
    return policy


def test_one_source_brings_all_in_order_and_the_alternate_is_left_alone() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)
    policy, took_s = transfer([first, second], NUM_CHUNKS)
    assert first.received == list(range(NUM_CHUNKS))
    assert second.received == []
    assert policy.num_repairs == 0
    assert took_s < 1.03 * UNDISTURBED_S


def test_windows_follow_the_rate() -> None:
    sizes: dict[float, int] = {}
    for rate in (2e6, RATE, 5e9):

        def look(now: float, policy: SourcePolicy, rate: float = rate) -> None:
            sizes[rate] = max(sizes.get(rate, 0), len(policy.states[0].outstanding) if now > 0.2 else 0)

        transfer([SimulatedSource(rate)], int(rate / CHUNK_BYTES / 2) + 4, at=look)
    assert sizes[2e6] <= MIN_WINDOW
    assert 5 <= sizes[RATE] <= 12
    assert sizes[5e9] == MAX_WINDOW


def test_two_sources_at_half_the_rate_bring_all_of_it() -> None:
    sources = [SimulatedSource(RATE / 2), SimulatedSource(RATE / 2)]
    _, took_s = transfer(sources, NUM_CHUNKS, SourceRules(num_striped=2))
    assert took_s < 1.05 * UNDISTURBED_S
    assert sorted(sources[0].received + sources[1].received) == list(range(NUM_CHUNKS))


def test_a_slow_partner_does_not_hold_up_the_end() -> None:
    sources = [SimulatedSource(RATE * 0.95), SimulatedSource(RATE * 0.05)]
    _, took_s = transfer(sources, NUM_CHUNKS, SourceRules(num_striped=2))
    assert took_s < 1.08 * UNDISTURBED_S
    assert len(sources[1].received) >= 0.02 * NUM_CHUNKS


def test_a_source_that_turns_slow_is_joined_by_another_and_goes_on() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE * 0.75)
    joined_at: list[float] = []

    def slow_down(now: float, policy: SourcePolicy) -> None:
        if now > 0.7:
            first.rate = RATE / 4
        if policy.states[1].phase is SourcePhase.OPEN and not joined_at:
            joined_at.append(now)

    policy, took_s = transfer([first, second], NUM_CHUNKS, at=slow_down)
    assert 0.8 < joined_at[0] < 1.0
    assert took_s < 1.2 * UNDISTURBED_S
    assert policy.num_repairs == 1
    assert len(first.received) > 0.5 * NUM_CHUNKS


def test_an_idle_transfer_does_not_mind() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def slow_down(now: float, policy: SourcePolicy) -> None:
        first.rate = RATE if now < 0.5 else RATE / 4

    policy, _ = transfer([first, second], NUM_CHUNKS, SourceRules(hedge_slow=False), slow_down)
    assert (len(second.received), policy.num_repairs) == (0, 0)


def test_a_silent_source_is_replaced_within_a_fifth_of_a_second() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def fall_silent(now: float, policy: SourcePolicy) -> None:
        first.rate = RATE if now < 0.7 else 0.0

    policy, took_s = transfer([first, second], NUM_CHUNKS, at=fall_silent)
    assert took_s < UNDISTURBED_S + 0.22
    assert policy.num_repairs == 1


def test_a_source_that_recovers_lets_the_other_rest() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def hiccup(now: float, policy: SourcePolicy) -> None:
        first.rate = 0.0 if 0.5 < now < 0.8 else RATE

    policy, _ = transfer([first, second], 3 * NUM_CHUNKS, at=hiccup)
    assert policy.states[1].standby
    assert len(second.received) < 0.5 * NUM_CHUNKS
    assert len(first.received) + len(second.received) == 3 * NUM_CHUNKS


def test_one_that_is_sound_only_beside_another_is_not_tried_alone_for_ever() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def slow_down(now: float, policy: SourcePolicy) -> None:
        first.rate = RATE if now < 0.7 else 0.55 * RATE

    policy, took_s = transfer([first, second], 10 * NUM_CHUNKS, at=slow_down)
    assert policy.num_repairs <= 6
    assert took_s < 0.75 * 10 * UNDISTURBED_S


def test_a_source_that_has_nothing_is_given_half_a_second() -> None:
    first, second = SimulatedSource(RATE, holds=10), SimulatedSource(RATE)
    joined_at: list[float] = []

    def look(now: float, policy: SourcePolicy) -> None:
        if policy.states[1].phase is SourcePhase.OPEN and not joined_at:
            joined_at.append(now)

    transfer([first, second], 60, at=look)
    assert 0.5 < joined_at[0] < 0.65
    assert first.received == list(range(10))


def test_what_a_source_lacks_is_asked_of_one_that_has_it() -> None:
    first, second = SimulatedSource(RATE / 2, holds=40), SimulatedSource(RATE / 2)
    transfer([first, second], 80, SourceRules(num_striped=2))
    assert len(first.received) >= 15
    assert max(first.received) < 40


def test_of_a_chunk_that_two_bring_one_is_passed_over() -> None:
    policy = opened(4, 2, num_striped=2)
    policy.ask(0, policy.requests(0).wanted, 0.0)
    assert policy.begin(0, 0, 0.0)
    assert not policy.begin(1, 0, 0.0)
    policy.accepted(0, 0, 10, 0.1)
    assert not policy.begin(1, 0, 0.2)
    assert policy.num_left == 3


def test_what_a_failed_source_owed_is_asked_of_the_next() -> None:
    policy = opened(4, 2)
    wanted = policy.requests(0).wanted
    policy.ask(0, wanted, 0.0)
    assert policy.begin(0, wanted[0], 0.0)
    policy.failed(0, final=False)
    assert policy.review(0.0) == [1]
    policy.opened(1, 0.0)
    policy.gained(1, range(4), 0.0)
    assert policy.requests(1).wanted == wanted
    assert policy.num_repairs == 1


def test_a_chunk_that_comes_after_it_was_cancelled_counts() -> None:
    policy = opened(2, 2, num_striped=2)
    first, second = policy.requests(0).wanted, policy.requests(1).wanted
    assert (first, second) == ([0, 1], [])
    policy.ask(0, first, 0.0)
    policy.ask(1, [1], 0.0)  # as after a theft
    assert policy.begin(0, 1, 0.1)
    assert policy.requests(1).cancelled == [1]


def test_refusals_are_final_and_failures_are_bounded() -> None:
    policy = SourcePolicy(3, 2, SourceRules())
    assert policy.review(0.0) == [0]
    policy.failed(0, final=True)
    assert policy.review(0.0) == [1]
    policy.failed(1, final=False)
    assert policy.review(0.0) == [1]
    assert not policy.exhausted
    policy.failed(1, final=False)
    assert policy.exhausted
    assert policy.review(0.0) == []
    assert SourcePolicy(3, 0, SourceRules()).exhausted


def test_what_is_due_for_too_long_is_overdue() -> None:
    policy = opened(3, 1)
    assert policy.overdue(0, 5.0, 10.0, 100.0) == ""  # nothing is due
    policy.ask(0, [0], 100.0)
    assert policy.overdue(0, 5.0, 10.0, 104.0) == ""
    assert "nothing was received for 5 s" in policy.overdue(0, 5.0, 10.0, 106.0)
    starving = SourcePolicy(3, 1, SourceRules())
    starving.review(0.0)
    starving.opened(0, 0.0)
    starving.ask(0, [0], 0.0)
    starving.frame_received(0, 11.0)
    assert "nothing to send for 10 s" in starving.overdue(0, 5.0, 10.0, 11.0)


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
def test_whatever_happens_each_chunk_is_accepted_once(
    rates: list[float], num_striped: int, changes: list[tuple[float, int, str]]
) -> None:
    """The last source never fails: so all chunks come, each written by one source."""
    sources = [SimulatedSource(rate) for rate in rates]
    todo = sorted(changes)

    def change(now: float, policy: SourcePolicy) -> None:
        while todo and todo[0][0] <= now:
            _, number, kind = todo.pop(0)
            if number >= len(sources) - 1:
                continue
            if kind in ("fail", "reopen") and policy.states[number].phase is SourcePhase.OPEN:
                if kind == "fail":
                    policy.failed(number, final=False)
                else:
                    policy.reopening(number, now)
                sources[number] = SimulatedSource(rates[number], received=sources[number].received)
            else:
                sources[number].rate = {"silent": 0.0, "slow": rates[number] / 5}.get(kind, rates[number])

    policy, _ = transfer(sources, 60, SourceRules(num_striped), change)
    assert sorted(place for source in sources for place in source.received) == list(range(60))
    assert all(state.num_failures <= MAX_FAILURES for state in policy.states)
