from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.conftest import AccountingRig
from torchrelay.gateway.billing.heartbeat import NO_ROW, BeatObservation, Heartbeat, observe_beats, stale_gateways


def test_a_count_that_stands_still_is_gone_after_a_while_by_the_observers_clock() -> None:
    seen = observe_beats({}, {"a": 5, "b": 5}, now=0.0)
    seen = observe_beats(seen, {"a": 6, "b": 5}, now=8.0)
    assert stale_gateways(seen, 9.9, after_s=10) == set()
    assert stale_gateways(seen, 10.0, after_s=10) == {"b"}


def test_a_gateway_without_a_row_is_gone_unless_it_makes_the_row_again() -> None:
    seen = observe_beats({}, {"a": NO_ROW, "b": NO_ROW}, now=0.0)
    seen = observe_beats(seen, {"a": 1, "b": NO_ROW}, now=4.0)
    assert stale_gateways(seen, 10.0, after_s=10) == {"b"}


@given(st.lists(st.integers(0, 3), min_size=1), st.floats(0.5, 5))
def test_who_counts_up_is_never_gone(steps: list[int], after_s: float) -> None:
    seen: dict[str, BeatObservation] = {}
    for beat, _ in enumerate(steps):
        now = beat * after_s * 0.9
        seen = observe_beats(seen, {"a": beat}, now)
        assert stale_gateways(seen, now, after_s) == set()


async def test_beats_count_up_and_leaving_takes_the_row_away(parts: AccountingRig) -> None:
    here, there = Heartbeat(parts.database, "here"), Heartbeat(parts.database, "there")
    await here.beat()
    await here.beat()
    await there.beat()
    assert await here.beats() == {"here": 2, "there": 1}
    await here.leave()
    assert await there.beats() == {"there": 1}
