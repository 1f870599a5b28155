"""Who makes room for a new connection: none that has shown a key, up to half of all places for each tenant, and of the
others the fairest choice.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.net.rpc.public_connections import PublicConnections

LIMIT = 4


def full(*addresses: str) -> PublicConnections:
    """Connections ``0``, ``1``, .. from these addresses, as many as the limit."""
    connections = PublicConnections(LIMIT)
    assert [connections.add(str(number), address) for number, address in enumerate(addresses)] == [None] * LIMIT
    return connections


def test_the_oldest_without_a_key_makes_room() -> None:
    connections = full("a", "a", "a", "a")
    connections.show_key("0", "acme")
    assert connections.add("new", "a") == "1"
    assert connections.add("newer", "b") == "2"
    assert len(connections) == LIMIT


def test_the_address_with_most_makes_room_for_others() -> None:
    connections = full("b", "a", "a", "a")
    assert connections.add("new", "c") == "1"
    assert connections.add("newer", "d") == "2"
    assert connections.add("newest", "e") == "0"  # each has one by now


def test_a_new_one_is_refused_where_all_others_have_a_key() -> None:
    connections = full("a", "a", "b", "b")
    for number in range(LIMIT):
        connections.show_key(str(number), "acme" if number < LIMIT // 2 else "zoo")
    assert connections.add("new", "c") == "new"
    connections.remove("3")
    assert connections.add("newer", "c") is None


def test_a_tenant_keeps_half_of_all_places_whatever_others_need() -> None:
    connections = full("a", "a", "a", "a")
    for number in range(LIMIT):
        for _ in range(3):  # one connection shows its key with each call
            connections.show_key(str(number), "acme")
    for number in range(2):
        assert connections.add(f"new {number}", "b") == str(2 + number)
        connections.show_key(f"new {number}", "zoo")
    assert connections.add("newer", "a") == "newer"
    connections.remove("0")
    assert connections.add("newest", "a") is None
    connections.show_key("newest", "acme")
    assert connections.add("last", "b") == "last", "half of them again"


def test_what_was_closed_is_forgotten() -> None:
    connections = full("a", "a", "a", "a")
    assert connections.add("new", "a") == "0"
    connections.show_key("0", "acme")
    connections.remove("0")
    assert len(connections) == LIMIT


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "show_key", "remove"]), st.integers(0, 30), st.sampled_from("abc")),
        max_size=200,
    )
)
def test_whoever_has_a_key_stays_and_the_limit_holds(steps: list[tuple[str, int, str]]) -> None:
    connections, num_added = PublicConnections(LIMIT), 0
    is_open: set[str] = set()
    with_key: dict[str, str] = {}  # its tenant
    for step, number, address in steps:
        name = str(number % max(num_added, 1))
        if step == "add":
            new = str(num_added)
            num_added += 1
            is_open.add(new)
            if (victim := connections.add(new, address)) is not None:
                assert victim in is_open - with_key.keys()
                is_open.remove(victim)
        elif step == "show_key":
            connections.show_key(name, address)
            of_tenant = sum(tenant == address for tenant in with_key.values())
            if name in is_open and name not in with_key and of_tenant < LIMIT // 2:
                with_key[name] = address
        else:
            connections.remove(name)
            is_open.discard(name)
            with_key.pop(name, None)
        assert len(connections) == len(is_open) <= LIMIT
