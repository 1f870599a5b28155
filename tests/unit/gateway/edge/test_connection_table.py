from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.edge.connection_table import ConnectionLimits, ConnectionTable, divide_descriptors

LIMITS = ConnectionLimits(total=6, keyless=4)
STEPS = ["add", "key", "begin", "end", "remove"]
GRPC_LIMITS = ConnectionLimits(total=4, keyless=4, per_tenant=2)


def table(limits: ConnectionLimits = LIMITS) -> ConnectionTable[str]:
    return ConnectionTable(limits)


def test_busiest_keyless_address_loses_its_oldest() -> None:
    connections = table()
    for name in ("other", "a1", "a2", "a3"):
        assert connections.add(name, name[0]) is None
    assert connections.add("a4", "a") == "a1"
    assert connections.add("b1", "b") == "a2"
    assert connections.add("b2", "b") == "a3"
    assert connections.add("b3", "b") == "b1"
    assert len(connections) == connections.num_keyless == 4


def test_tenants_excess_connections_count_as_keyless() -> None:
    connections = table(ConnectionLimits(total=6, keyless=2, per_tenant=1))
    for name in ("t1", "t2", "t3"):
        connections.add(name, "x")
        connections.show_key(name, "acme")
    assert connections.has_key("t1") and not connections.has_key("t2") and connections.num_keyless == 2
    assert connections.add("new", "y") == "t2"
    connections.remove("t1")
    connections.show_key("t3", "acme")
    assert connections.has_key("t3")


def test_tenant_with_most_idle_loses_its_longest_idle() -> None:
    connections = table(ConnectionLimits(total=4, keyless=2))
    for name, tenant in (("z1", "zoo"), ("a1", "acme"), ("a2", "acme"), ("a3", "acme")):
        connections.add(name, "x")
        connections.show_key(name, tenant)
    for name in ("z1", "a2", "a3"):  # a1 is busy
        connections.end_request(name)
    assert connections.add("new", "y") == "a2"
    connections.show_key("new", "zoo")
    connections.show_key("z1", "zoo")  # again, by its next request
    assert connections.add("newer", "y") == "a3"
    connections.show_key("newer", "zoo")
    assert connections.add("last", "y") == "last", "all others are in use"


def test_new_connections_evict_idle_ones_before_each_other() -> None:
    connections = table(ConnectionLimits(total=4, keyless=2))
    for name in ("a1", "a2", "a3"):
        connections.add(name, "x")
        connections.show_key(name, "acme")
        connections.end_request(name)
    assert connections.add("new", "y") is None
    assert connections.add("newer", "z") == "a1"


def test_new_connection_is_closed_when_tenants_fill_their_halves() -> None:
    connections = table(GRPC_LIMITS)
    for name, tenant in (("a0", "acme"), ("a1", "acme"), ("z0", "zoo"), ("z1", "zoo")):
        assert connections.add(name, "x") is None
        for _ in range(3):  # a connection shows its key with each call
            connections.show_key(name, tenant)
    assert connections.add("new", "y") == "new"
    connections.remove("a0")
    assert connections.add("newer", "x") is None
    connections.show_key("newer", "acme")
    assert connections.add("last", "y") == "last", "acme has its half again"
    assert len(connections) == 4


@given(
    limits=st.sampled_from([LIMITS, GRPC_LIMITS, ConnectionLimits(total=3, keyless=2)]),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 30), st.sampled_from("abc")), max_size=200),
)
def test_limits_hold_and_busy_connection_with_a_key_is_never_closed(
    limits: ConnectionLimits, steps: list[tuple[str, int, str]]
) -> None:
    connections, num_added = table(limits), 0
    is_open: set[str] = set()
    tenants: dict[str, str] = {}  # by connection that has shown a key within its tenant's share
    idle: set[str] = set()  # of these
    for step, number, group in steps:
        name = str(number % max(num_added, 1))
        if step == "add":
            new = str(num_added)
            num_added += 1
            is_open.add(new)
            if (victim := connections.add(new, group)) is not None:
                assert victim in is_open - (tenants.keys() - idle)
                is_open.remove(victim)
                tenants.pop(victim, None)
        elif step == "key":
            connections.show_key(name, group)
            is_within_share = list(tenants.values()).count(group) < (limits.per_tenant or 99)
            if name in tenants:
                idle.discard(name)
            elif name in is_open and is_within_share:
                tenants[name] = group
        elif step == "begin":
            connections.begin_request(name)
            idle.discard(name)
        elif step == "end":
            connections.end_request(name)
            idle |= {name} & tenants.keys()
        else:
            connections.remove(name)
            is_open.discard(name)
            tenants.pop(name, None)
        idle &= tenants.keys()
        assert connections.has_key(name) == (name in tenants), "a closed connection is forgotten"
        assert len(connections) == len(is_open) <= limits.total
        assert connections.num_keyless == len(is_open) - len(tenants) <= limits.keyless


@pytest.mark.parametrize("num_descriptors", [256, 1024, 4096, 1 << 20])
def test_limits_leave_descriptors_for_the_gateway(num_descriptors: int) -> None:
    rest, num_grpc = divide_descriptors(num_descriptors, ConnectionLimits(), 1024)
    assert rest.total + 3 * num_grpc <= num_descriptors - min(256, num_descriptors // 2)
    assert rest.keyless <= rest.total // 2
    assert rest.total >= 64
    if num_descriptors == 1 << 20:
        assert (rest, num_grpc) == (ConnectionLimits(), 1024)
