"""Fair queueing: the queue itself, and its effect on tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.harness import GREEDY, Model, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.engine.batching.fair_queue import FairQueue
from torchrelay.engine.core import GroupSpec
from torchrelay.engine.instance import Instance

ModelOf = Callable[..., Model]
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def served(queue: FairQueue[int], costs: dict[int, tuple[str, float]]) -> Iterator[tuple[str, int]]:
    while (item := queue.head()) is not None:
        tenant, cost = costs[item]
        queue.remove(tenant, item)
        queue.charge(tenant, cost, WEIGHTS[tenant])
        queue.check_integrity()
        yield tenant, item


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60))
def test_waiting_tenants_get_their_share(arrivals: list[tuple[str, int]]) -> None:
    """While two tenants both wait, their service by weight differs by no more than one item of each (SFQ's theorem)."""
    queue: FairQueue[int] = FairQueue()
    costs = {item: (tenant, float(cost)) for item, (tenant, cost) in enumerate(arrivals)}
    for item, (tenant, _) in costs.items():
        queue.push(tenant, item)
    left = Counter(tenant for tenant, _ in costs.values())
    worst = {tenant: max((cost for name, cost in arrivals if name == tenant), default=0) for tenant in WEIGHTS}
    got = dict.fromkeys(WEIGHTS, 0.0)
    order: dict[str, list[int]] = {tenant: [] for tenant in WEIGHTS}
    for tenant, item in served(queue, costs):
        got[tenant] += costs[item][1] / WEIGHTS[tenant]
        left[tenant] -= 1
        order[tenant].append(item)
        waiting = [name for name in WEIGHTS if left[name]]
        for one in waiting:
            for other in waiting:
                assert got[one] - got[other] <= worst[one] / WEIGHTS[one] + worst[other] / WEIGHTS[other]
    assert all(items == sorted(items) for items in order.values())  # first come first served within a tenant
    assert sum(map(len, order.values())) == len(arrivals) and not queue


@given(st.lists(st.tuples(st.sampled_from(["push", "first", "serve", "remove"]), st.sampled_from("abc")), max_size=80))
def test_it_holds_what_was_pushed_and_not_taken(moves: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[str, list[int]] = {tenant: [] for tenant in WEIGHTS}
    numbers = count()
    for move, tenant in moves:
        if move in ("push", "first"):
            item = next(numbers)
            queue.push(tenant, item, first=move == "first")
            waiting[tenant].insert(0 if move == "first" else len(waiting[tenant]), item)
        elif move == "remove" and waiting[tenant]:
            queue.remove(tenant, waiting[tenant].pop())
        elif move == "remove":
            queue.remove(tenant, -1)
        elif (head := queue.head()) is not None:
            owner = next(name for name, items in waiting.items() if head in items)
            assert waiting[owner].pop(0) == head
            queue.charge(owner, 10, WEIGHTS[owner])
            queue.remove(owner, head)
        queue.check_integrity()
        assert len(queue) == sum(map(len, waiting.values()))
        assert (queue.head() is None) == (len(queue) == 0)
        assert all((tenant, item) in queue for tenant, items in waiting.items() for item in items)


def test_absence_neither_saves_up_turns_nor_sheds_a_debt() -> None:
    queue: FairQueue[int] = FairQueue()
    costs = {item: ("a" if item < 20 else "b", 1.0) for item in range(40)}
    for item in range(20):
        queue.push("a", item)
    order = served(queue, costs)
    for _ in range(10):
        next(order)
    for item in range(20, 30):
        queue.push("b", item)
    tenants = [next(order)[0] for _ in range(6)]
    assert Counter(tenants) == {"a": 2, "b": 4}  # by weight: "b" was away for ten turns, and gets none of them back
    queue.charge("a", 5, 1)  # a long one
    for item in range(20):
        queue.remove("a", item)
    queue.push("a", 19)
    assert [next(order)[0] for _ in range(4)] == ["b"] * 4  # leaving for a moment does not help


def test_an_absent_tenant_is_forgotten_once_all_others_have_caught_up() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(1000):
        queue.push(f"tenant {item}", item)
        queue.remove(f"tenant {item}", item)
    assert queue.head() is None
    assert queue.num_tenants == 0
    queue.check_integrity()


# The effect on tenants


def of(tenant: str, group: GroupSpec) -> GroupSpec:
    return replace(group, tenant_id=tenant)


def test_a_crowd_does_not_hold_up_another_tenant(model_of: ModelOf) -> None:
    """A thousand prompts of one tenant wait; a single one of another is computed in the next batch but one."""
    model = model_of()
    instance = model.instance(token_budget=64)
    one = replace(GREEDY, max_tokens=2)
    for number in range(1000):
        instance.prefill(of("crowd", group_of(prompt_of(40, number % 7), f"{number}/0", one)))
    for _ in range(5):
        instance.step()
    instance.prefill(of("single", group_of(prompt_of(30), "single/0", one)))
    steps = [instance.step() for _ in range(2)]
    assert "single/0" in {name for step in steps for name in step.prefilled}
    assert outputs([*steps, *(instance.step() for _ in range(2))])["single/0", 0] == model.expected(prompt_of(30), 2)


def test_a_tenant_whose_long_prompt_is_under_way_does_not_hold_up_another(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=32)
    instance.prefill(of("long", group_of(prompt_of(480), "long/0")))
    instance.step()
    instance.prefill(of("short", group_of(prompt_of(20), "short/0")))
    assert instance.step().prefilled == ("short/0",)


def test_tenants_prefill_alternately(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=32, prefix_cache=False)
    for number in range(60):
        for tenant in "ab":
            group = group_of(prompt_of(16, number), f"{tenant}{number}/0", replace(GREEDY, max_tokens=1))
            instance.prefill(of(tenant, group))
    done = Counter(name[0] for step in (instance.step() for _ in range(30)) for name in step.prefilled)
    assert done["b"] == pytest.approx(30, abs=1)
    run_to_end(instance)
    assert_idle(instance)


def test_pages_go_by_turns_and_within_a_tenant_in_order(model_of: ModelOf) -> None:
    """Three pages: one group at a time."""
    model = model_of()
    instance = model.instance(pool_bytes=3 * 16 * model.instance().kv_shape.bytes_per_token)
    for tenant in "aabbab":
        name = f"{tenant}{len(instance.groups())}/0"
        instance.prefill(of(tenant, group_of(prompt_of(20), name)))
    order = [name for step in run(instance) for name in step.prefilled]
    assert [name[0] for name in order] == list("ababab")
    assert all([*names] == sorted(names) for names in ([n for n in order if n[0] == t] for t in "ab"))


def test_decoding_goes_on_whatever_waits(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=16)
    instance.prefill(of("a", group_of(prompt_of(5), "a/0")))
    instance.step()
    for number in range(50):
        instance.prefill(of("b", group_of(prompt_of(100), f"{number}/0")))
    steps = [instance.step() for _ in range(GREEDY.max_tokens - 1)]
    assert len([token for step in steps for token in step.tokens if token.group_id == "a/0"]) == GREEDY.max_tokens - 1
    assert all(step.num_positions_prefilled >= 15 for step in steps)


def run_to_end(instance: Instance) -> None:
    while instance.has_work():
        instance.step()
