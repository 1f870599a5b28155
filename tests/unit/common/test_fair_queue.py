"""Start-time fair queueing: shares of service, order within a tenant, debts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, count

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.fair_queue import FairQueue, StartTags

TENANTS = "abc"


def served(queue: FairQueue[int], costs: dict[int, tuple[str, float]]) -> Iterator[tuple[str, int]]:
    while (item := queue.head()) is not None:
        tenant, cost = costs[item]
        queue.remove(tenant, item)
        queue.charge(tenant, cost)
        queue.check_integrity()
        yield tenant, item


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 50)), max_size=60))
def test_waiting_tenants_get_equal_service(arrivals: list[tuple[str, int]]) -> None:
    """While two tenants both wait, their service differs by no more than one item of each (SFQ's theorem)."""
    queue: FairQueue[int] = FairQueue()
    costs = {item: (tenant, float(cost)) for item, (tenant, cost) in enumerate(arrivals)}
    for item, (tenant, _) in costs.items():
        queue.push(tenant, item)
    left = Counter(tenant for tenant, _ in costs.values())
    largest = {tenant: max((cost for name, cost in arrivals if name == tenant), default=0) for tenant in TENANTS}
    service = dict.fromkeys(TENANTS, 0.0)
    order: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
    for tenant, item in served(queue, costs):
        service[tenant] += costs[item][1]
        left[tenant] -= 1
        order[tenant].append(item)
        for first, second in combinations((name for name in TENANTS if left[name]), 2):
            assert abs(service[first] - service[second]) <= largest[first] + largest[second]
    assert all(items == sorted(items) for items in order.values())  # first come first served within a tenant
    assert sum(map(len, order.values())) == len(arrivals) and not queue


@given(st.lists(st.tuples(st.sampled_from(["push", "first", "serve", "remove"]), st.sampled_from("abc")), max_size=80))
def test_queue_holds_items_pushed_and_not_taken(moves: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
    numbers = count()
    for move, tenant in moves:
        if move in ("push", "first"):
            item = next(numbers)
            queue.push(tenant, item, first=move == "first")
            waiting[tenant].insert(0 if move == "first" else len(waiting[tenant]), item)
        elif move == "remove" and waiting[tenant]:
            assert queue.remove(tenant, waiting[tenant].pop())
        elif move == "remove":
            assert not queue.remove(tenant, -1)
        elif (head := queue.head()) is not None:
            owner = next(name for name, items in waiting.items() if head in items)
            assert waiting[owner].pop(0) == head
            queue.charge(owner, 10)
            queue.remove(owner, head)
        queue.check_integrity()
        assert len(queue) == sum(map(len, waiting.values()))
        assert {tenant: queue.num_of(tenant) for tenant in TENANTS} == {name: len(waiting[name]) for name in TENANTS}
        assert (queue.head() is None) == (len(queue) == 0)
        assert all((tenant, item) in queue for tenant, items in waiting.items() for item in items)


def test_absence_neither_saves_turns_nor_clears_debt() -> None:
    queue: FairQueue[int] = FairQueue()
    costs = {item: ("a" if item < 20 else "b", 1.0) for item in range(40)}
    for item in range(20):
        queue.push("a", item)
    queue.push("b", 20)
    order = served(queue, costs)
    assert Counter(next(order)[0] for _ in range(11)) == {"a": 10, "b": 1}
    for item in range(21, 31):
        queue.push("b", item)
    assert Counter(next(order)[0] for _ in range(6)) == {"a": 3, "b": 3}  # "b" was away for nine turns
    queue.charge("a", 5)  # a long item
    for item in range(20):
        queue.remove("a", item)
    queue.push("a", 19)
    assert [next(order)[0] for _ in range(4)] == ["b"] * 4  # leaving for a moment does not help


def test_empty_queue_forgets_tags() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(1000):
        queue.push(f"tenant {item}", item)
        queue.charge(f"tenant {item}", 1)
        queue.remove(f"tenant {item}", item)
    assert queue.head() is None
    assert len(queue.tags) == 0
    assert queue.tags["new"] == 1.0


def test_tags_that_time_has_passed_are_dropped() -> None:
    tags = StartTags()
    tags.charge("debtor", 1e6)
    for number in range(1000):
        tags.join(f"tenant {number}")
        tags.serve(f"tenant {number}", 1.0)
        tags.serve(f"tenant {number}")  # time moves on to its tag
    assert len(tags) <= 65 and tags["debtor"] == 1e6 and tags.has_debts


def test_refund_restores_tag_without_credit() -> None:
    tags = StartTags()
    tags.join("a")
    tags.serve("a", 8.0)
    tags.refund("a", 8.0)
    tags.refund("unknown", 8.0)
    assert (tags["a"], tags["unknown"]) == (0.0, 0.0) and not tags.has_debts
