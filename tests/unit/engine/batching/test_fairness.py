"""Tenants take turns: their prompts by fair queueing, and their choices within the limit of a step's duration."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.harness import GREEDY, ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.decode_shares import MAX_SLOWDOWN
from torchrelay.engine.batching.pages import PageTables
from torchrelay.engine.batching.prefix_cache import PrefixCache
from torchrelay.engine.batching.sequences import DecodeSequence, SequenceGroup
from torchrelay.engine.core import ChoiceSpec, GroupSpec, NewToken, SamplingParams


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


def latency_of(base_s: float, per_position_s: float, per_attended_s: float = 0.0) -> LatencyModel:
    return LatencyModel(decode=StepCost(base_s, per_position_s, per_attended_s, num_steps=1))


def decoding(
    latency: LatencyModel | None,
    num_choices: dict[str, int],
    num_prompt_tokens: dict[str, int] | None = None,
    token_budget: int = 8192,
) -> BatchScheduler:
    """A scheduler with one group per tenant, whose prompts are computed."""
    pages = PageTables(2048, page_tokens=16)
    scheduler = BatchScheduler(
        pages,
        PrefixCache(pages.allocator, 16),
        token_budget=token_budget,
        max_context_tokens=1024,
        copy_page=lambda source, target: None,
        latency=lambda: latency,
    )
    for tenant, count in num_choices.items():
        add(scheduler, tenant, count, (num_prompt_tokens or {}).get(tenant, 4))
    step(scheduler)
    return scheduler


def add(scheduler: BatchScheduler, tenant: str, num_choices: int, num_prompt_tokens: int) -> None:
    choices, prompt = tuple(map(ChoiceSpec, range(num_choices))), tuple(range(num_prompt_tokens))
    group = GroupSpec(tenant, prompt, len(prompt), SamplingParams(max_tokens=32), choices, tenant)
    scheduler.submit(SequenceGroup.of(group))


def step(scheduler: BatchScheduler) -> Counter[str]:
    """The choices of each tenant that the next step decodes."""
    return Counter(each.spec.tenant_id for each in run_step(scheduler))


def run_step(scheduler: BatchScheduler) -> tuple[DecodeSequence, ...]:
    (plan,) = scheduler.plan()
    rows = [(each.spec, each.choice, each.next_position) for each in plan.decoding]
    rows += [(chunk.context.group.spec, choice, 0) for chunk in plan.chunks for choice in chunk.context.choices]
    scheduler.commit(plan, [NewToken(spec.group_id, choice, position, 7) for spec, choice, position in rows])
    scheduler.check_integrity()
    return plan.decoding


@pytest.mark.parametrize(
    ("latency", "num_choices"),
    [
        (latency_of(1, 1), {"many": 20}),  # nobody else
        (None, {"many": 20, "one": 1}),  # nothing known
        (LatencyModel(), {"many": 20, "one": 1}),
        (latency_of(1, 0.02), {"many": 20, "one": 1}),  # rows cost little
        (latency_of(1, 1), {"many": 3, "as many": 3, "more": 3}),
    ],
)
def test_all_choices_compute_within_limit(latency: LatencyModel | None, num_choices: dict[str, int]) -> None:
    assert step(decoding(latency, num_choices)) == num_choices


def test_choices_above_share_take_turns() -> None:
    scheduler = decoding(latency_of(1, 0.1), {"many": 20, "one": 1})
    steps = [step(scheduler) for _ in range(10)]
    assert steps == [{"many": 5, "one": 1}] * 10, "1.6 <= 1.5 * 1.1 < 1.7"
    group = scheduler.get("many")
    assert group is not None
    lengths = Counter(len(each.output) for each in group.decodings)
    assert lengths == {3: 10, 4: 10}, "50 steps among 20"


def test_all_choices_compute_beside_long_prompt() -> None:
    latency = LatencyModel(StepCost(1.0, 0.05, 0.0, num_steps=1), StepCost(1.0, 0.1, 0.0, num_steps=1))
    scheduler = decoding(latency, {"many": 20, "one": 1})
    assert step(scheduler)["many"] == 5
    add(scheduler, "another", 1, 900)
    assert step(scheduler)["many"] == 20, "2.1 s of 46 s"
    assert step(scheduler)["many"] < 20


def test_delayed_choices_use_no_prompt_budget() -> None:
    scheduler = decoding(latency_of(1, 0.1), {"many": 60, "one": 1}, token_budget=64)
    add(scheduler, "another", 1, 300)
    (plan,) = scheduler.plan()
    assert len(plan.decoding) < 20 and sum(chunk.num_tokens for chunk in plan.chunks) == 64 - len(plan.decoding)


@given(
    num_choices=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 24), min_size=2),
    num_prompt_tokens=st.dictionaries(st.sampled_from("abcde"), st.sampled_from([1, 40, 600])),
    costs=st.tuples(*(st.floats(1e-5, 1.0) for _ in range(2)), st.floats(0, 0.01)),
)
def test_step_duration_keeps_limit(
    num_choices: dict[str, int],
    num_prompt_tokens: dict[str, int],
    costs: tuple[float, float, float],
) -> None:
    latency = latency_of(*costs)
    scheduler = decoding(latency, num_choices, num_prompt_tokens=num_prompt_tokens)

    def time_of(rows: list[int]) -> float:
        return latency.tbt_s(len(rows), sum(rows)) - latency.decode.base_s

    for _ in range(3):
        wanted = {each.spec.tenant_id: [row.num_computed + 1 for row in each.decodings] for each in scheduler.groups}
        computed: dict[str, list[int]] = {}
        for row in run_step(scheduler):
            computed.setdefault(row.spec.tenant_id, []).append(row.num_computed)  # one more by now
        assert computed.keys() == wanted.keys()
        took_s = latency.decode.base_s + sum(map(time_of, computed.values()))
        share_s = {tenant: time_of(rows) for tenant, rows in wanted.items()}
        limit_s = (1 + MAX_SLOWDOWN * (len(wanted) - 1)) * (costs[0] + min(share_s.values()))
        least = min(share_s, key=share_s.__getitem__)
        assert len(computed[least]) == len(wanted[least])
        if took_s > limit_s * (1 + 1e-6):  # then no tenant has more than its guaranteed part
            least_s = max(min(share_s.values()), max(time_of(rows[:1]) for rows in wanted.values()))
            most_s = max(map(time_of, computed.values()))
            assert most_s <= least_s * (1 + 1e-6) + 1e-12
