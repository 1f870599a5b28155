"""Relay plans: one incoming copy per host, no circles, chains instead of stars."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler.scene import a_copy, a_model, a_store
from torchrelay.scheduler.core import REMOTE
from torchrelay.scheduler.planning import Arrow, Relays, plan, whole_holders

NAMES = [f"s{number}" for number in range(8)]


def test_targets_of_the_remote_store_form_one_chain() -> None:
    arrows = plan([], [], ["s1", "s2", "s3"], {})
    assert [(arrow.target, arrow.upstream) for arrow in arrows] == [("s1", REMOTE), ("s2", "s1"), ("s3", "s2")]
    assert arrows[2].sources == ("s2", "s1", REMOTE)


def test_a_complete_holder_heads_the_chain_and_sends_once() -> None:
    arrows = plan(["s0"], [], ["s1", "s2", "s3"], {})
    assert [arrow.upstream for arrow in arrows] == ["s0", "s1", "s2"]
    assert arrows[2].sources == ("s2", "s0", "s1", REMOTE)  # alternates: complete holders first, the remote store last


def test_two_complete_holders_head_two_chains() -> None:
    arrows = plan(["s0", "s7"], [], ["s1", "s2", "s3", "s4"], {})
    assert Counter(arrow.upstream for arrow in arrows).most_common(1)[0][1] == 1
    assert [arrow.upstream for arrow in arrows[:2]] == ["s0", "s7"]


def test_later_targets_follow_the_end_of_a_running_chain() -> None:
    arrows = plan(["s0"], ["s1", "s2"], ["s3"], {"s0": 1, "s1": 1})
    assert arrows[0].upstream == "s2"


def test_a_host_that_has_it_is_still_told_and_costs_nobody() -> None:
    arrows = plan(["s0", "s1"], [], ["s1", "s2"], {})
    assert arrows[0].already_there and arrows[0].sources == ("s0", REMOTE)
    assert arrows[1].upstream == "s0"


names = st.lists(st.sampled_from(NAMES), unique=True)


@given(names, names, names, st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3)))
def test_one_incoming_arrow_each_and_no_circles(
    whole: list[str], filling: list[str], targets: list[str], outgoing: dict[str, int]
) -> None:
    filling = [store for store in filling if store not in whole]
    arrows = plan(whole, filling, targets, outgoing)
    assert [arrow.target for arrow in arrows] == targets
    order = {store: rank for rank, store in enumerate([*filling, *(t for t in targets if t not in filling)])}
    for arrow in arrows:
        assert arrow.sources[-1] == REMOTE and arrow.sources.count(REMOTE) == 1
        assert arrow.target not in arrow.sources
        assert len(set(arrow.sources)) == len(arrow.sources)
        for source in arrow.sources[:-1]:  # whatever repair takes, bytes flow one way along this order
            assert source in whole or order[source] < order[arrow.target]


def test_running_relays_are_holders_until_they_end() -> None:
    model = a_model()
    relays = Relays()
    relays.start(model.pack_id, [Arrow("s1", (REMOTE,)), Arrow("s2", ("s1", REMOTE))], now=100.0)
    assert relays.filling(model.pack_id, []) == ("s1", "s2")
    assert relays.outgoing() == {REMOTE: 1, "s1": 1}
    relays.observe(a_store("s1", "h1", [a_copy(model, 3)]), now=101.0)
    assert len(relays) == 2
    relays.observe(a_store("s1", "h1", [a_copy(model)]), now=102.0)
    assert relays.filling(model.pack_id, []) == ("s2",)
    relays.observe(a_store("s2", "h2"), now=200.0)  # it never began
    assert len(relays) == 0


def test_whole_holders_are_those_with_every_chunk() -> None:
    model = a_model()
    stores = [a_store("s1", "h1", [a_copy(model)]), a_store("s2", "h2", [a_copy(model, 7)]), a_store("s3", "h3")]
    assert whole_holders(model.pack_id, stores) == ("s1",)
