"""The decisions of a transfer, in simulated time: order, windows, striping, doubt, joining, resting, stealing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transfer.swarm_parts import CHUNK_BYTES, SimulatedSource, transfer
from torchrelay.transfer.chunks import MAX_WINDOW, MIN_WINDOW
from torchrelay.transfer.lanes import Phase
from torchrelay.transfer.swarm import MAX_STRIKES, Rules, Swarm

RATE = 50e6
NUM_CHUNKS = 256
UNDISTURBED_S = NUM_CHUNKS * CHUNK_BYTES / RATE  # 1.34


def opened(num_chunks: int, num_sources: int, num_striped: int = 1) -> Swarm:
    """A swarm whose first sources are open and have everything."""
    swarm = Swarm(num_chunks, num_sources, Rules(num_striped))
    for number in swarm.review(0.0):
        swarm.opened(number, 0.0)
        swarm.gained(number, range(num_chunks), 0.0)
    return swarm


def test_one_source_brings_all_in_order_and_the_alternate_is_left_alone() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)
    swarm, took_s = transfer([first, second], NUM_CHUNKS)
    assert first.brought == list(range(NUM_CHUNKS))
    assert second.brought == []
    assert swarm.num_repairs == 0
    assert took_s < 1.03 * UNDISTURBED_S


def test_windows_follow_the_rate() -> None:
    sizes: dict[float, int] = {}
    for rate in (2e6, RATE, 5e9):

        def look(now: float, swarm: Swarm, rate: float = rate) -> None:
            sizes[rate] = max(sizes.get(rate, 0), len(swarm.lanes[0].outstanding) if now > 0.2 else 0)

        transfer([SimulatedSource(rate)], int(rate / CHUNK_BYTES / 2) + 4, at=look)
    assert sizes[2e6] <= MIN_WINDOW
    assert 5 <= sizes[RATE] <= 12
    assert sizes[5e9] == MAX_WINDOW


def test_two_sources_at_half_the_rate_bring_all_of_it() -> None:
    sources = [SimulatedSource(RATE / 2), SimulatedSource(RATE / 2)]
    _, took_s = transfer(sources, NUM_CHUNKS, Rules(num_striped=2))
    assert took_s < 1.05 * UNDISTURBED_S
    assert sorted(sources[0].brought + sources[1].brought) == list(range(NUM_CHUNKS))


def test_a_slow_partner_does_not_hold_up_the_end() -> None:
    sources = [SimulatedSource(RATE * 0.95), SimulatedSource(RATE * 0.05)]
    _, took_s = transfer(sources, NUM_CHUNKS, Rules(num_striped=2))
    assert took_s < 1.08 * UNDISTURBED_S
    assert len(sources[1].brought) >= 0.02 * NUM_CHUNKS


def test_a_source_that_turns_slow_is_joined_by_another_and_goes_on() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE * 0.75)
    joined_at: list[float] = []

    def slow_down(now: float, swarm: Swarm) -> None:
        if now > 0.7:
            first.rate = RATE / 4
        if swarm.lanes[1].phase is Phase.OPEN and not joined_at:
            joined_at.append(now)

    swarm, took_s = transfer([first, second], NUM_CHUNKS, at=slow_down)
    assert 0.8 < joined_at[0] < 1.0
    assert took_s < 1.2 * UNDISTURBED_S
    assert swarm.num_repairs == 1
    assert len(first.brought) > 0.5 * NUM_CHUNKS


def test_an_idle_transfer_does_not_mind() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def slow_down(now: float, swarm: Swarm) -> None:
        first.rate = RATE if now < 0.5 else RATE / 4

    swarm, _ = transfer([first, second], NUM_CHUNKS, Rules(hedge_slow=False), slow_down)
    assert (len(second.brought), swarm.num_repairs) == (0, 0)


def test_a_silent_source_is_replaced_within_a_fifth_of_a_second() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def fall_silent(now: float, swarm: Swarm) -> None:
        first.rate = RATE if now < 0.7 else 0.0

    swarm, took_s = transfer([first, second], NUM_CHUNKS, at=fall_silent)
    assert took_s < UNDISTURBED_S + 0.22
    assert swarm.num_repairs == 1


def test_a_source_that_recovers_lets_the_other_rest() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def hiccup(now: float, swarm: Swarm) -> None:
        first.rate = 0.0 if 0.5 < now < 0.8 else RATE

    swarm, _ = transfer([first, second], 3 * NUM_CHUNKS, at=hiccup)
    assert swarm.lanes[1].resting
    assert len(second.brought) < 0.5 * NUM_CHUNKS
    assert len(first.brought) + len(second.brought) == 3 * NUM_CHUNKS


def test_one_that_is_sound_only_beside_another_is_not_tried_alone_for_ever() -> None:
    first, second = SimulatedSource(RATE), SimulatedSource(RATE)

    def slow_down(now: float, swarm: Swarm) -> None:
        first.rate = RATE if now < 0.7 else 0.55 * RATE

    swarm, took_s = transfer([first, second], 10 * NUM_CHUNKS, at=slow_down)
    assert swarm.num_repairs <= 6
    assert took_s < 0.75 * 10 * UNDISTURBED_S


def test_a_source_that_has_nothing_is_given_half_a_second() -> None:
    first, second = SimulatedSource(RATE, holds=10), SimulatedSource(RATE)
    joined_at: list[float] = []

    def look(now: float, swarm: Swarm) -> None:
        if swarm.lanes[1].phase is Phase.OPEN and not joined_at:
            joined_at.append(now)

    transfer([first, second], 60, at=look)
    assert 0.5 < joined_at[0] < 0.65
    assert first.brought == list(range(10))


def test_what_a_source_lacks_is_asked_of_one_that_has_it() -> None:
    first, second = SimulatedSource(RATE / 2, holds=40), SimulatedSource(RATE / 2)
    transfer([first, second], 80, Rules(num_striped=2))
    assert len(first.brought) >= 15
    assert max(first.brought) < 40


def test_of_a_chunk_that_two_bring_one_is_passed_over() -> None:
    swarm = opened(4, 2, num_striped=2)
    swarm.ask(0, swarm.orders(0).wanted, 0.0)
    assert swarm.begin(0, 0, 0.0)
    assert not swarm.begin(1, 0, 0.0)
    swarm.accepted(0, 0, 10, 0.1)
    assert not swarm.begin(1, 0, 0.2)
    assert swarm.num_left == 3


def test_what_a_failed_source_owed_is_asked_of_the_next() -> None:
    swarm = opened(4, 2)
    wanted = swarm.orders(0).wanted
    swarm.ask(0, wanted, 0.0)
    assert swarm.begin(0, wanted[0], 0.0)
    swarm.failed(0, final=False)
    assert swarm.review(0.0) == [1]
    swarm.opened(1, 0.0)
    swarm.gained(1, range(4), 0.0)
    assert swarm.orders(1).wanted == wanted
    assert swarm.num_repairs == 1


def test_a_chunk_that_comes_after_it_was_cancelled_counts() -> None:
    swarm = opened(2, 2, num_striped=2)
    first, second = swarm.orders(0).wanted, swarm.orders(1).wanted
    assert (first, second) == ([0, 1], [])
    swarm.ask(0, first, 0.0)
    swarm.ask(1, [1], 0.0)  # as after a theft
    assert swarm.begin(0, 1, 0.1)
    assert swarm.orders(1).cancelled == [1]


def test_refusals_are_final_and_failures_are_bounded() -> None:
    swarm = Swarm(3, 2, Rules())
    assert swarm.review(0.0) == [0]
    swarm.failed(0, final=True)
    assert swarm.review(0.0) == [1]
    swarm.failed(1, final=False)
    assert swarm.review(0.0) == [1]
    assert not swarm.exhausted
    swarm.failed(1, final=False)
    assert swarm.exhausted
    assert swarm.review(0.0) == []
    assert Swarm(3, 0, Rules()).exhausted


def test_what_is_due_for_too_long_is_overdue() -> None:
    swarm = opened(3, 1)
    assert swarm.overdue(0, 5.0, 10.0, 100.0) == ""  # nothing is due
    swarm.ask(0, [0], 100.0)
    assert swarm.overdue(0, 5.0, 10.0, 104.0) == ""
    assert "nothing was received for 5 s" in swarm.overdue(0, 5.0, 10.0, 106.0)
    starving = Swarm(3, 1, Rules())
    starving.review(0.0)
    starving.opened(0, 0.0)
    starving.ask(0, [0], 0.0)
    starving.heard(0, 11.0)
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

    def change(now: float, swarm: Swarm) -> None:
        while todo and todo[0][0] <= now:
            _, number, kind = todo.pop(0)
            if number >= len(sources) - 1:
                continue
            if kind in ("fail", "reopen") and swarm.lanes[number].phase is Phase.OPEN:
                if kind == "fail":
                    swarm.failed(number, final=False)
                else:
                    swarm.reopening(number, now)
                sources[number] = SimulatedSource(rates[number], brought=sources[number].brought)
            else:
                sources[number].rate = {"silent": 0.0, "slow": rates[number] / 5}.get(kind, rates[number])

    swarm, _ = transfer(sources, 60, Rules(num_striped), change)
    assert sorted(place for source in sources for place in source.brought) == list(range(60))
    assert all(lane.strikes <= MAX_STRIKES for lane in swarm.lanes)
