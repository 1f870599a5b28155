"""The effect of fair queueing on tenants."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.unit.engine.harness import GREEDY, ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.engine.core import GroupSpec


def of(tenant: str, group: GroupSpec) -> GroupSpec:
    return replace(group, tenant_id=tenant)


def test_single_prompt_overtakes_many_of_other_tenant(model_of: ModelOf) -> None:
    """While 300 prompts of a tenant wait, a prompt of another tenant is computed in the next batch but one."""
    model = model_of()
    instance = model.instance(token_budget=64)
    sampling = replace(GREEDY, max_tokens=2)
    for number in range(300):
        instance.prefill(of("crowd", group_of(prompt_of(40, number % 7), f"{number}/0", sampling)))
    for _ in range(5):
        instance.step()
    instance.prefill(of("single", group_of(prompt_of(30), "single/0", sampling)))
    steps = [instance.step() for _ in range(2)]
    assert "single/0" in {name for step in steps for name in step.prefilled}
    assert outputs([*steps, *(instance.step() for _ in range(2))])["single/0", 0] == model.expected(prompt_of(30), 2)


def test_long_prompt_does_not_delay_other_tenant(model_of: ModelOf) -> None:
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
    run(instance)
    assert_idle(instance)


def test_pages_alternate_between_tenants_in_order(model_of: ModelOf) -> None:
    """Three pages: one group at a time."""
    model = model_of()
    instance = model.instance(num_pages=3)
    for tenant in "aabbab":
        name = f"{tenant}{len(instance.groups())}/0"
        instance.prefill(of(tenant, group_of(prompt_of(20), name)))
    order = [name for step in run(instance) for name in step.prefilled]
    assert [name[0] for name in order] == list("ababab")
    assert all([*names] == sorted(names) for names in ([n for n in order if n[0] == t] for t in "ab"))


def test_decoding_continues_while_prompts_wait(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=16)
    instance.prefill(of("a", group_of(prompt_of(5), "a/0")))
    instance.step()
    for number in range(50):
        instance.prefill(of("b", group_of(prompt_of(100), f"{number}/0")))
    steps = [instance.step() for _ in range(GREEDY.max_tokens - 1)]
    assert len([token for step in steps for token in step.tokens if token.group_id == "a/0"]) == GREEDY.max_tokens - 1
    assert all(step.num_positions_prefilled >= 15 for step in steps)
