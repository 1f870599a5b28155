"""Shares of time between tenants, with a clock that the tests move."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.inference.text.processes.bounded_queue import BoundedQueue


def queue(max_running: int = 1, max_waiting: int = 1000, max_bytes: int = 1 << 30) -> BoundedQueue[str]:
    return BoundedQueue(max_running, max_waiting, max_bytes)


def take(waiting: BoundedQueue[str]) -> str | None:
    taken = waiting.next(lambda item: True)
    return None if taken is None else taken[0]


def test_items_of_a_tenant_run_in_order_one_at_once() -> None:
    waiting = queue()
    for item in "abc":
        assert waiting.add("acme", item, 1)
    for item in "abc":
        assert take(waiting) == item
        assert take(waiting) is None, "one at once"
        waiting.ended("acme", 1.0)
    assert take(waiting) is None


def test_many_slow_items_delay_another_tenant_by_one() -> None:
    waiting = queue()
    for number in range(100):
        waiting.add("slow", f"slow-{number}", 1)
    assert take(waiting) == "slow-0"
    waiting.add("quick", "quick-0", 1)
    waiting.add("quick", "quick-1", 1)
    waiting.ended("slow", 2.0)
    for number in range(2):
        assert take(waiting) == f"quick-{number}"
        waiting.ended("quick", 0.001)
    assert take(waiting) == "slow-1"


def test_used_time_is_remembered_while_nothing_waits() -> None:
    waiting = queue()
    served: Counter[str] = Counter()
    # The slow tenant never has a second item in the queue; the quick one always has one.
    waiting.add("quick", "quick", 1)
    waiting.add("slow", "slow", 1)
    for _ in range(1000):
        item = take(waiting)
        assert item is not None
        served[item] += 1
        waiting.ended(item, 1.0 if item == "slow" else 0.01)
        waiting.add(item, item, 1)
    assert 95 <= served["quick"] / served["slow"] <= 105


def test_idle_time_accumulates_no_credit() -> None:
    waiting = queue()
    for _ in range(50):
        waiting.add("early", "early", 1)
        assert take(waiting) == "early"
        waiting.ended("early", 1.0)
    order: list[str | None] = []
    for tenant in ("early", "late"):
        for number in range(4):
            waiting.add(tenant, f"{tenant}-{number}", 1)
    for _ in range(8):
        item = take(waiting)
        assert item is not None
        order.append(item.partition("-")[0])
        waiting.ended(item.partition("-")[0], 1.0)
    assert order[:4] in (["early", "late", "early", "late"], ["late", "early", "late", "early"])


def test_item_without_a_place_lets_the_next_tenant_pass() -> None:
    waiting = queue()
    waiting.add("acme", "big", 1)
    waiting.add("beta", "small", 1)
    assert waiting.next(lambda item: "here" if item == "small" else None) == ("small", "here")
    assert waiting.next(lambda item: None) is None


def test_running_items_per_tenant_are_bounded() -> None:
    waiting = queue(max_running=2)
    for number in range(5):
        waiting.add("acme", f"acme-{number}", 1)
    waiting.add("beta", "beta-0", 1)
    assert [take(waiting) for _ in range(4)] == ["acme-0", "beta-0", "acme-1", None]
    waiting.ended("acme", 0.1)
    assert take(waiting) == "acme-2"


def test_waiting_items_and_bytes_per_tenant_are_bounded() -> None:
    waiting = queue(max_waiting=2, max_bytes=10)
    assert waiting.add("acme", "a", 100), "a first item of any size"
    assert not waiting.add("acme", "b", 1)
    assert waiting.add("beta", "c", 5) and waiting.add("beta", "d", 5)
    assert not waiting.add("beta", "e", 0), "two wait"
    assert waiting.remove("acme", "a") and not waiting.remove("acme", "a")
    assert not waiting.remove("nobody", "a")
    assert waiting.add("acme", "b", 1)
    assert waiting.num_waiting == 3
    assert (take(waiting), take(waiting)) == ("c", "b")
    assert (waiting.num_running("acme"), waiting.num_running("beta"), waiting.num_running("nobody")) == (1, 1, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 3.0)), min_size=1, max_size=60))
def test_items_are_served_once_in_tenant_order(items: list[tuple[str, float]]) -> None:
    waiting: BoundedQueue[int] = BoundedQueue(2, 1000, 1 << 30)
    for number, (tenant, _) in enumerate(items):
        waiting.add(tenant, number, 1)
    served: list[int] = []
    while (taken := waiting.next(lambda item: True)) is not None:
        served.append(taken[0])
        waiting.ended(*items[taken[0]])
    assert sorted(served) == list(range(len(items)))
    for tenant in "abc":
        own = [number for number in served if items[number][0] == tenant]
        assert own == sorted(own)
    assert waiting.num_waiting == 0
