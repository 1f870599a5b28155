"""One tenant's choices slow another's decode steps no more than stated, and take turns."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.engine.batching.batch_scheduler import BatchScheduler
from torchrelay.engine.batching.decode_shares import MAX_SLOWDOWN, DecodeShares
from torchrelay.engine.batching.pages import PageTables
from torchrelay.engine.batching.prefix_cache import PrefixCache
from torchrelay.engine.batching.sequences import SequenceGroup
from torchrelay.engine.core import ChoiceSpec, GroupSpec, NewToken, SamplingParams

PROMPT = (1, 2, 3, 4)


def latency_of(base_s: float, per_position_s: float, per_attended_s: float = 0.0) -> LatencyModel:
    return LatencyModel(decode=StepCost(base_s, per_position_s, per_attended_s, num_steps=1))


def decoding(latency: LatencyModel | None, num_choices: dict[str, int], weights: dict[str, float]) -> BatchScheduler:
    """A scheduler whose groups have all computed their prompts: one of each tenant."""
    pages = PageTables(512, page_tokens=16)
    scheduler = BatchScheduler(
        pages,
        PrefixCache(pages.allocator, 16),
        token_budget=4096,
        max_context_tokens=64,
        copy_page=lambda source, target: None,
        decode_shares=DecodeShares(lambda: latency),
    )
    for tenant, count in num_choices.items():
        choices = tuple(map(ChoiceSpec, range(count)))
        sampling = SamplingParams(max_tokens=32)
        group = SequenceGroup.of(
            GroupSpec(tenant, PROMPT, len(PROMPT), sampling, choices, tenant, weights.get(tenant, 1.0))
        )
        scheduler.submit(group)
    step(scheduler)
    return scheduler


def step(scheduler: BatchScheduler) -> Counter[str]:
    """The choices of each tenant that the next step decodes."""
    (plan,) = scheduler.plan()
    rows = [(each.spec, each.choice, each.next_position) for each in plan.decoding]
    rows += [(chunk.context.group.spec, choice, 0) for chunk in plan.chunks for choice in chunk.context.choices]
    scheduler.commit(plan, [NewToken(spec.group_id, choice, position, 7) for spec, choice, position in rows])
    scheduler.check_integrity()
    return Counter(each.spec.tenant_id for each in plan.decoding)


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
def test_everybody_computes(latency: LatencyModel | None, num_choices: dict[str, int]) -> None:
    assert step(decoding(latency, num_choices, {})) == num_choices


def test_who_has_many_is_held_back_and_its_choices_take_turns() -> None:
    scheduler = decoding(latency_of(1, 0.1), {"many": 20, "one": 1}, {})
    steps = [step(scheduler) for _ in range(10)]
    assert steps == [{"many": 5, "one": 1}] * 10, "1.6 <= 1.5 * 1.1 < 1.7"
    group = scheduler.get("many")
    assert group is not None
    lengths = Counter(len(each.output) for each in group.decodings)
    assert lengths == {3: 10, 4: 10}, "50 steps among 20"


def test_a_heavier_tenant_computes_more() -> None:
    rows = step(decoding(latency_of(1, 0.1), {"light": 20, "heavy": 20, "one": 1}, {"heavy": 3.0}))
    assert rows["one"] == 1 and rows["heavy"] == 3 * rows["light"] < 20


@given(
    num_choices=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 24), min_size=2),
    weights=st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.5, 1.0, 2.5])),
    costs=st.tuples(*(st.floats(1e-5, 1.0) for _ in range(2)), st.floats(0, 0.01)),
)
def test_no_step_is_longer_than_stated(
    num_choices: dict[str, int], weights: dict[str, float], costs: tuple[float, float, float]
) -> None:
    latency = latency_of(*costs)
    scheduler = decoding(latency, num_choices, weights)
    for _ in range(3):
        contexts = {
            each.spec.tenant_id: [one.num_computed for one in each.decodings] for each in scheduler.groups
        }  # before the step
        rows = step(scheduler)
        assert set(rows) == set(num_choices)
        least = max(1, int(min(count / weights.get(tenant, 1.0) for tenant, count in num_choices.items())))
        equal = {
            tenant: min(count, max(1, int(least * weights.get(tenant, 1.0)))) for tenant, count in num_choices.items()
        }
        assert rows >= Counter(equal)
        if rows in (equal, num_choices):
            continue
        took_s = latency.tbt_s(rows.total(), 0)  # at least
        total = sum(weights.get(tenant, 1.0) for tenant in num_choices)
        for tenant, computed in contexts.items():
            alone_s = latency.tbt_s(len(computed), sum(each + 1 for each in computed))
            others = total / weights.get(tenant, 1.0) - 1
            assert took_s <= (1 + MAX_SLOWDOWN * others) * alone_s * (1 + 1e-9)
