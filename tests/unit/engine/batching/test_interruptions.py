"""Cancels from other threads and deadlines take effect between two layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.unit.engine.harness import (
    GREEDY,
    Clock,
    ModelOf,
    answer,
    assert_idle,
    export_prefill,
    group_of,
    half_loaded,
    import_prefill,
    outputs,
    prompt_of,
    run,
)
from torchrelay.engine.batching.interruptions import DeadlineQueue, PendingCancels
from torchrelay.engine.batching.sequences import GroupState, SequenceGroup
from torchrelay.engine.core import GroupSpec
from torchrelay.engine.instance import Instance
from torchrelay.engine.model.batch import Batch

PROMPT = prompt_of(40)


class Between:
    """Acts after a layer of the running step, like another thread; records the rows and free pages of each layer."""

    def __init__(self, instance: Instance, after: int, action: Callable[[], None]) -> None:
        self.rows: list[int] = []
        self.free: list[int] = []
        inner = instance.model.transformer.run_layer

        def run_layer(layer: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
            self.rows.append(len(hidden))
            self.free.append(instance.num_free_pages)
            hidden = inner(layer, hidden, batch)
            if layer == after and len(self.rows) == layer + 1:
                action()
            return hidden

        instance.model.transformer.run_layer = run_layer  # type: ignore[method-assign]


def late(group: GroupSpec, deadline_s: float | None) -> GroupSpec:
    return replace(group, deadline_s=deadline_s)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("why", ["cancel", "deadline"])
@pytest.mark.parametrize("family", ["gemma3", "mixtral"])
def test_rows_of_ended_group_leave_batch_at_next_layer(model_of: ModelOf, family: str, why: str, layer: int) -> None:
    """The tokens of other groups are unchanged: a choice that decodes, and a prompt on either side. After the last
    layer the rows leave before the head.
    """
    model, clock = model_of(family), Clock()
    instance = model.instance(token_budget=256, prefix_cache=False, clock=clock)
    instance.prefill(late(group_of(prompt_of(15), "decoding/0"), 500))
    instance.prefill(late(group_of(prompt_of(16), "ends as well/0"), 200))
    steps = [instance.step()]
    instance.prefill(group_of(prompt_of(17), "before/0"))
    instance.prefill(late(group_of(PROMPT, "ends/0"), 200))
    instance.prefill(group_of(prompt_of(70), "after/0"))

    def act() -> None:
        if why == "deadline":
            clock.now_s = 200
        else:
            instance.cancel_soon("ends/0")
            instance.cancel_soon("ends as well/0")

    between = Between(instance, layer, act)
    steps.append(instance.step())
    instance.check_integrity()
    whole, left = 2 + 17 + 40 + 70, 1 + 17 + 70
    assert between.rows == [whole] * (layer + 1) + [left] * (2 - layer)
    assert len(set(between.free)) == (1 if layer == 2 else 2)  # their pages were free within the step
    assert steps[-1].expired == (("ends as well/0", "ends/0") if why == "deadline" else ())
    steps += run(instance)
    actual = outputs(steps)
    for name, length in (("decoding/0", 15), ("before/0", 17), ("after/0", 70)):
        assert actual[name, 0] == model.expected(prompt_of(length))
    assert ("ends/0", 0) not in actual
    assert_idle(instance)


def test_step_ends_when_all_rows_ended(model_of: ModelOf) -> None:
    model = model_of()
    for instance in (model.instance(), half_loaded(model, 2)):
        instance.prefill(group_of(PROMPT))
        between = Between(instance, 0, lambda instance=instance: instance.cancel_soon("r/0"))  # type: ignore[misc]
        step = instance.step()
        assert step.tokens == () and step.prefilled == ()
        instance.step()
        assert between.rows == [40]
        assert_idle(instance)


def test_applied_cancel_does_not_hit_later_group(model_of: ModelOf) -> None:
    instance = model_of().instance()
    instance.prefill(group_of(PROMPT))
    instance.cancel_soon("r/0")
    instance.cancel("r/0")
    assert len(answer(instance, PROMPT)) == GREEDY.max_tokens


def test_deadline_ends_group_in_any_state(model_of: ModelOf) -> None:
    model, clock = model_of(), Clock()
    instance = model.instance(num_pages=10, token_budget=16, clock=clock)
    received = late(replace(group_of(prompt_of(20), "received/0"), prompt=()), 101)
    kv_import = instance.import_kv(received, instance.kv_layout(received))
    instance.prefill(late(group_of(prompt_of(20), "decodes/0"), 103))
    instance.step(), instance.step()
    instance.prefill(late(group_of(prompt_of(41), "runs/0"), 102))
    instance.prefill(late(group_of(prompt_of(40), "waits/0"), 102))
    instance.prefill(late(group_of(prompt_of(40), "has time/0"), 200))
    assert instance.step().expired == ()
    steps = []
    for now_s in (101, 102, 103):
        clock.now_s = now_s
        steps.append(instance.step())
        instance.check_integrity()
    assert [step.expired for step in steps] == [("received/0",), ("runs/0", "waits/0"), ("decodes/0",)]
    kv_import.start({0: 1})  # too late: nothing happens
    steps += run(instance)
    assert outputs(steps)["has time/0", 0] == model.expected(prompt_of(40))
    assert_idle(instance)


def test_deadline_survives_preemption_and_export(model_of: ModelOf) -> None:
    """On another host the deadline is by another clock."""
    model, clock, other_clock = model_of(), Clock(), Clock()
    other_clock.now_s = 7000
    instance, other = half_loaded(model, 2, clock=clock), model.instance(clock=other_clock)
    instance.prefill(late(group_of(PROMPT), 150))
    instance.step()
    instance.preempt("r/0")
    for name, deadline_s in (("s/0", 150), ("for ever/0", None)):
        instance.prefill(late(group_of(PROMPT, name), deadline_s))
    assert outputs(run(instance)) == {} and {group.layer for group in instance.groups()} == {2}
    clock.now_s = 120
    exported = [export_prefill(instance, name) for name in ("s/0", "for ever/0")]
    import_prefill(other, exported[0], deadline_s=7030)
    import_prefill(other, exported[1])
    clock.now_s = other_clock.now_s = 150
    assert "r/0" in instance.step().expired
    other_clock.now_s = 7029.9
    assert other.step().expired == ()
    other_clock.now_s = 7030
    assert other.step().expired == ("s/0",)
    assert outputs(run(other)).keys() == {("for ever/0", 0)}
    instance.cancel("r/0")
    assert_idle(instance)
    assert_idle(other)


def test_pending_cancels_are_drained_once() -> None:
    cancels = PendingCancels()
    cancels.put("a", None)
    cancels.put("b", 1)
    cancels.put("a", None)
    cancels.put("c", None)
    cancels.discard("c", None)
    cancels.discard("d", None)
    assert cancels.drain() == [("a", None), ("b", 1)]
    assert cancels.drain() == []


def test_deadlines_of_ended_groups_are_dropped() -> None:
    deadlines = DeadlineQueue()
    for number in range(5000):
        group = SequenceGroup.of(late(group_of(PROMPT, f"{number}/0"), 10.0 + number))
        deadlines.add(group)
        if number % 100:
            group.state = GroupState.GONE
        assert len(deadlines) <= 2 * (number // 100 + 1) + 64
    assert deadlines.due(9.9) == []
    assert [group.spec.group_id for group in deadlines.due(250)] == ["0/0", "100/0", "200/0"]
    deadlines.add(SequenceGroup.of(group_of(PROMPT)))
    assert deadlines.due(250) == []
