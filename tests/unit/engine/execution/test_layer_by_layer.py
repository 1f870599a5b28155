"""Prompts that run layer by layer on an instance whose layers are still arriving, and stop at a given boundary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.harness import (
    GREEDY,
    ModelOf,
    assert_idle,
    group_of,
    half_loaded,
    outputs,
    prompt_of,
    run,
)
from torchrelay.engine.core import EMPTY_STEP

LENGTHS = (1, 16, 70)
FEW = replace(GREEDY, max_tokens=6)


@pytest.mark.parametrize("boundary", (1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_output_is_exact(model_of: ModelOf, family: str, boundary: int) -> None:
    """Several prompts run beside a chunked prompt, and the layers arrive one by one."""
    model = model_of(family)
    instance = half_loaded(model, boundary, token_budget=23)
    num_layers = instance.config.num_layers
    for length in LENGTHS:
        instance.prefill(group_of(prompt_of(length), f"{length}/0", FEW), until=num_layers)
    assert outputs(run(instance)) == {}
    assert instance.step() is EMPTY_STEP
    for segment in range(boundary + 1, num_layers + 2):
        instance.segment_ready(segment)
    instance.prefill(group_of(prompt_of(15), "chunked/0", FEW))
    steps = run(instance)
    expected = {(f"{length}/0", 0): model.expected(prompt_of(length))[:6] for length in LENGTHS}
    assert outputs(steps) == expected | {("chunked/0", 0): model.expected(prompt_of(15))[:6]}
    assert {name for step in steps for name in step.prefilled} == {name for name, _ in outputs(steps)}
    assert sum(step.num_positions_prefilled for step in steps) == sum(LENGTHS) + 15
    assert_idle(instance)


def test_earliest_runnable_prompt_runs(model_of: ModelOf) -> None:
    """ZigZag: while the first batch waits for its next layer, later batches catch up; then it runs again."""
    model = model_of()
    instance = half_loaded(model, 1, token_budget=16)
    for name in "ab":
        instance.prefill(group_of(prompt_of(16), f"{name}/0"), until=3)

    def boundaries() -> list[int]:
        return [group.layer for group in instance.groups()]

    seen = []
    for segment in (2, 3, 4):
        while instance.has_work():
            instance.step()
            seen.append(boundaries())
        instance.segment_ready(segment)
    assert seen == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]
    assert set(outputs(run(instance))) == {("a/0", 0), ("b/0", 0)}


def test_small_prompts_at_same_boundary_share_batch(model_of: ModelOf) -> None:
    instance = model_of().instance(token_budget=32)
    for number in range(3):
        instance.prefill(group_of(prompt_of(16), f"{number}/0"), until=2)
    steps = [instance.step() for _ in range(4)]
    assert not instance.has_work() and all(step is not EMPTY_STEP for step in steps)
    assert [group.layer for group in instance.groups()] == [2, 2, 2]


def test_prompt_is_cancelled_or_preempted_at_any_boundary(model_of: ModelOf) -> None:
    model = model_of("qwen2")
    expected = model.expected(prompt_of(40))
    for num_steps in range(5):
        for way in ("cancel", "preempt"):
            instance = model.instance(token_budget=16)
            instance.prefill(group_of(prompt_of(40)), until=3)
            steps = [instance.step() for _ in range(num_steps)]
            if way == "cancel":
                instance.cancel("r/0")
            else:
                instance.preempt("r/0")
            instance.check_integrity()
            steps += run(instance)
            assert way == "cancel" or outputs(steps)["r/0", 0] == expected
            assert_idle(instance)
