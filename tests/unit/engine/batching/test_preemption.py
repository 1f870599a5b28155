"""Preempted groups continue as if nothing had happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.harness import GREEDY, ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.common.errors import Conflict
from torchrelay.engine.batching.preemption import groups_to_preempt
from torchrelay.engine.batching.sequences import SequenceGroup
from torchrelay.engine.core import SamplingParams


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-moe"])
def test_preemption_after_any_step_keeps_output(model_of: ModelOf, family: str) -> None:
    """Preempts in a chunk, in the last chunk and at every decoded position, with and without the prefix cache."""
    model = model_of(family)
    prompt = prompt_of(70)
    expected = model.expected(prompt)[:8]
    for cached in (True, False):
        instance = model.instance(token_budget=40, page_tokens=8, prefix_cache=cached)
        for num_steps in range(10):
            instance.prefill(group_of(prompt, sampling=replace(GREEDY, max_tokens=8)))
            steps = [instance.step() for _ in range(num_steps)]
            instance.preempt("r/0")
            assert instance.num_free_pages == instance.num_pages
            instance.check_integrity()
            steps += run(instance)
            assert outputs(steps) == {("r/0", 0): expected}
            assert_idle(instance)


def test_cached_tokens_are_reported_with_first_token_only(model_of: ModelOf) -> None:
    instance = model_of().instance()
    instance.prefill(group_of(prompt_of(40)))
    steps = [instance.step(), instance.step()]
    instance.preempt("r/0")
    steps += run(instance)
    assert [token.num_cached for step in steps for token in step.tokens] == [0] * GREEDY.max_tokens
    assert sum(step.num_positions_prefilled for step in steps) == 40 + (42 - 32)  # two pages were still there


def test_group_that_cannot_be_recomputed_is_not_preempted(model_of: ModelOf) -> None:
    model = model_of()
    instance = model.instance(num_pages=8)
    received = replace(group_of(prompt_of(20)), prompt=())
    kv_import = instance.import_kv(received, instance.kv_layout(received))
    with pytest.raises(Conflict):
        instance.preempt("r/0")
    kv_import.drop()
    sampling = SamplingParams(temperature=1.2, seed=11, max_tokens=16)
    instance.prefill(group_of(prompt_of(80), "s/0", sampling, forced=[(), (), ()]))  # 5 pages shared, and 1 each
    steps = [instance.step(), instance.step(), instance.step()]
    with pytest.raises(Conflict):  # each choice has its own output by now, and they would share no page
        instance.preempt("s/0")
    instance.check_integrity()
    steps += run(instance)
    assert {len(tokens) for tokens in outputs(steps).values()} == {16}
    instance.preempt("s/0")  # gone: nothing happens
    assert_idle(instance)


# The victims


def preempted(groups: list[tuple[str, int, bool]], num_lacking: int, num_pages: int = 100) -> list[int]:
    """The victims' indices in ``groups``: (tenant, pages, whether it can be preempted), in order of admission."""
    running = []
    for number, (tenant, pages, _) in enumerate(groups):
        spec = replace(group_of(prompt_of(1), f"{number}/0"), tenant_id=tenant)
        running.append(SequenceGroup(spec, num_pages=pages, admission_order=number))
    wanting = SequenceGroup(replace(group_of(prompt_of(1)), tenant_id="wanting"), arrival_order=len(groups))
    victims = groups_to_preempt(
        wanting, running, num_pages, num_lacking, lambda group: groups[group.admission_order][2]
    )
    return [group.admission_order for group in victims]


def test_victims_are_youngest_of_tenant_furthest_above_share() -> None:
    groups = [("a", 30, True), ("b", 30, True), ("b", 5, False), ("a", 30, True)]  # a share is 33 pages
    assert preempted(groups, 1, 99) == [3]
    assert preempted(groups, 31, 99) == [3, 1]  # then "b" is 2 above, "a" below
    assert preempted(groups, 61, 99) == []  # not enough: no group is preempted in vain
    assert preempted(groups, 0, 99) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.booleans()), max_size=12), st.integers(1, 100))
def test_victims_suffice_and_exceed_their_share(groups: list[tuple[str, int, bool]], num_wanted: int) -> None:
    victims = [groups[number] for number in preempted(groups, num_wanted)]
    assert all(can_be_preempted for _, _, can_be_preempted in victims)
    held = Counter({"wanting": 0})
    for tenant, num_pages, _ in groups:
        held[tenant] += num_pages
    share = 100 / len(held)
    for number, (tenant, num_pages, _) in enumerate(victims):
        assert sum(other[1] for other in victims[:number]) < num_wanted
        assert held[tenant] > share
        held[tenant] -= num_pages
    assert not victims or sum(num_pages for _, num_pages, _ in victims) >= num_wanted


def test_tenant_without_pages_preempts_tenant_above_share(model_of: ModelOf) -> None:
    """Four groups of one tenant fill twelve pages. A prompt of another tenant has its first token in the next step."""
    model = model_of()
    instance = model.instance(num_pages=12)
    for number in range(5):
        instance.prefill(replace(group_of(prompt_of(20, number), f"{number}/0"), tenant_id="greedy"))
    steps = [instance.step(), instance.step()]
    instance.prefill(replace(group_of(prompt_of(20, 9), "modest/0"), tenant_id="modest"))
    steps.append(instance.step())
    assert "modest/0" in steps[-1].prefilled
    assert "3/0" not in {token.group_id for token in steps[-1].tokens}  # the youngest
    assert {f"{number}/0" for number in range(3)} < {token.group_id for token in steps[-1].tokens}
    instance.prefill(replace(group_of(prompt_of(20, 8), "second/0"), tenant_id="modest"))
    steps.append(instance.step())
    assert "second/0" not in steps[-1].prefilled  # "modest" has pages: its next waits like any other
    steps += run(instance)
    prefilled = [name for step in steps for name in step.prefilled]
    assert sum(step.num_positions_recomputed for step in steps) == 20 + 2, "its prompt and its tokens"
    assert prefilled.count("3/0") == 2 and all(prefilled.count(f"{number}/0") == 1 for number in (0, 1, 2, 4))
    actual = outputs(steps)
    for number in range(5):
        assert actual[f"{number}/0", 0] == model.expected(prompt_of(20, number))
    assert actual["modest/0", 0] == model.expected(prompt_of(20, 9))
    assert_idle(instance)


def test_group_is_preempted_at_most_once(model_of: ModelOf) -> None:
    """A tenant's only group fills the pool, and small groups of another tenant keep arriving. All are served."""
    model = model_of()
    instance = model.instance(num_pages=12)
    long = replace(group_of(prompt_of(150), "long/0", replace(GREEDY, max_tokens=40)), tenant_id="long")
    instance.prefill(long)
    steps = [instance.step() for _ in range(3)]
    for number in range(12):
        instance.prefill(replace(group_of(prompt_of(20, number), f"{number}/0"), tenant_id="many"))
        steps += [instance.step() for _ in range(6)]
        instance.check_integrity()
    steps += run(instance)
    prefilled = [name for step in steps for name in step.prefilled]
    assert prefilled.count("long/0") == 2
    assert prefilled[-1] != "long/0"  # it was not delayed to the end
    assert outputs(steps)["long/0", 0] == model.expected(prompt_of(150), 40)
    assert_idle(instance)


def test_single_tenant_is_never_preempted(model_of: ModelOf) -> None:
    instance = model_of().instance(num_pages=6)
    for number in range(6):
        instance.prefill(group_of(prompt_of(20, number), f"{number}/0"))
    prefilled = [name for step in run(instance) for name in step.prefilled]
    assert prefilled == [f"{number}/0" for number in range(6)]
