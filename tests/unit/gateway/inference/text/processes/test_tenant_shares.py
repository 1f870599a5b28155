"""Shares of time between tenants, with a clock that the tests move."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.gateway.inference.text.processes.frames import FileId
from torchrelay.gateway.inference.text.processes.process_choice import ProcessState, choose
from torchrelay.gateway.inference.text.processes.suspects import Suspects
from torchrelay.gateway.inference.text.processes.tenant_lru import TenantLru
from torchrelay.gateway.limits.bounded_queue import BoundedQueue


def queue_of(max_running: int = 1, max_waiting: int = 1000, max_bytes: int = 1 << 30) -> BoundedQueue[str]:
    return BoundedQueue(max_running, max_waiting, max_bytes)


def take(waiting: BoundedQueue[str]) -> str | None:
    taken = waiting.next(lambda item: True)
    return None if taken is None else taken[0]


def test_many_slow_items_delay_another_tenant_by_one() -> None:
    waiting = queue_of()
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
    waiting = queue_of()
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
    waiting = queue_of()
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
    waiting = queue_of()
    waiting.add("acme", "big", 1)
    waiting.add("beta", "small", 1)
    assert waiting.next(lambda item: "here" if item == "small" else None) == ("small", "here")
    assert waiting.next(lambda item: None) is None


def test_running_items_per_tenant_are_bounded() -> None:
    waiting = queue_of(max_running=2)
    for number in range(5):
        waiting.add("acme", f"acme-{number}", 1)
    waiting.add("beta", "beta-0", 1)
    assert [take(waiting) for _ in range(4)] == ["acme-0", "beta-0", "acme-1", None]
    waiting.ended("acme", 0.1)
    assert take(waiting) == "acme-2"


def test_waiting_items_and_bytes_per_tenant_are_bounded() -> None:
    waiting = queue_of(max_waiting=2, max_bytes=10)
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


def cache(max_bytes: int = 40, **owners: str) -> TenantLru[str]:
    """Entries of 10 bytes by key and owner."""
    made: TenantLru[str] = TenantLru(max_bytes)
    for key, owner in owners.items():
        made.add(key, owner, 10)
    return made


def test_own_entries_are_evicted_first() -> None:
    """A tenant with many models used to empty the cache of everybody."""
    lru = cache(a="beta", b="acme", c="beta", d="acme")
    assert lru.evict_for(10, "acme") == ["b"]
    assert lru.evict_for(25, "acme") == ["d", "a"]
    assert list(lru) == ["c"] and lru.num_bytes == 10
    assert "c" in lru and "a" not in lru and len(lru) == 1


def test_least_recently_used_entries_go_and_kept_ones_stay() -> None:
    lru = cache(a="acme", b="acme", c="acme")
    lru.use("a", "acme")
    assert lru.evict_for(10, "acme") == []
    assert lru.evict_for(20, "acme", kept={"b"}) == ["c"]
    assert lru.evict_for(1000, "acme", kept={"b"}) == ["a"], "what cannot fit is held alone"


def test_entries_used_by_several_tenants_have_no_owner() -> None:
    lru = cache(stock="acme", own="acme", other="beta")
    lru.use("stock", "beta")
    lru.use("stock", "acme")
    assert lru.evict_for(20, "acme") == ["own"]
    assert lru.evict_for(30, "acme") == ["other"]


A, B, C = (("tokenizer.json", letter) for letter in "abc")


def process(*files: FileId, is_busy: bool = False, is_slow: bool = False) -> ProcessState:
    held: TenantLru[FileId] = TenantLru(100)
    for file in files:
        held.add(file, "acme", 10)
    return ProcessState(held, 0.0, is_busy, is_slow)


def test_process_with_the_tokenizer_is_chosen_first() -> None:
    states = [process(), process(A), process(B)]
    assert choose(states, A) is states[1]
    assert choose(states, C) is states[0], "it has least"


def test_busy_holder_is_waited_for_until_it_is_slow() -> None:
    assert choose([process(B), process(A, is_busy=True)], A) is None
    states = [process(B), process(A, is_busy=True, is_slow=True)]
    assert choose(states, A) is states[0]
    states = [*states, process(A, is_busy=True)]
    assert choose(states, A) is None
    assert choose(states[1:], A) is None, "none is free"
    assert choose([], A) is None


def test_only_the_pair_is_confined_for_its_time() -> None:
    suspects = Suspects()
    assert not suspects.is_suspect("acme", "loop", 0)
    suspects.note("acme", "loop", 0)
    assert suspects.is_suspect("acme", "loop", 59) and not suspects.is_suspect("acme", "loop", 60)
    assert not suspects.is_suspect("acme", "fine", 59)
    assert not suspects.is_suspect("beta", "loop", 59), "the same model, called by others"
    suspects.note("acme", "loop", 50)  # killed again
    assert suspects.is_suspect("acme", "loop", 109) and not suspects.is_suspect("acme", "loop", 110)


def test_tenant_with_several_suspects_is_confined_wholly() -> None:
    suspects = Suspects()
    for number in range(100):
        suspects.note("acme", f"loop-{number}", number / 10)
    assert suspects.is_suspect("acme", "fine", 10) and not suspects.is_suspect("beta", "fine", 10)
    assert not suspects.is_suspect("acme", "fine", 60), "the first of the three is over"
