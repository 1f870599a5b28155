"""Prompts that run layer by layer on an instance whose layers are still arriving."""

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
from torchrelay.engine.instance import Instance

LENGTHS = (1, 16, 70)
FEW = replace(GREEDY, max_tokens=6)


def boundaries(instance: Instance) -> list[int]:
    return [group.layer for group in instance.groups()]


@pytest.mark.parametrize("boundary", (1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_output_is_exact(model_of: ModelOf, family: str, boundary: int) -> None:
    """The layers arrive one by one; once all are here, the prompts continue in chunks beside a new prompt."""
    model = model_of(family)
    instance = half_loaded(model, boundary, token_budget=23)
    num_layers = instance.config.num_layers
    for length in LENGTHS:
        instance.prefill(group_of(prompt_of(length), f"{length}/0", FEW))
    assert outputs(run(instance)) == {}
    assert instance.step() is EMPTY_STEP
    assert boundaries(instance) == [boundary] * 3
    for segment in range(boundary + 1, num_layers + 2):
        instance.segment_ready(segment)
    instance.prefill(group_of(prompt_of(15), "new/0", FEW))
    steps = run(instance)
    expected = {(f"{length}/0", 0): model.expected(prompt_of(length))[:6] for length in LENGTHS}
    assert outputs(steps) == expected | {("new/0", 0): model.expected(prompt_of(15))[:6]}
    assert {name for step in steps for name in step.prefilled} == {name for name, _ in outputs(steps)}
    assert sum(step.num_positions_prefilled for step in steps) == sum(LENGTHS) + 15
    assert_idle(instance)


def test_progress_counts_positions_through_all_layers(model_of: ModelOf) -> None:
    """A cancelled prompt is billed by it, so a prompt that ends during a load is billed like an unfinished step."""
    instance = half_loaded(model_of(), 2, token_budget=16)
    instance.prefill(group_of(prompt_of(40)))
    early = run(instance)
    assert [step.ran_one_layer for step in early] == [True, True]
    assert all(step.prompts == () and step.num_positions_prefilled == 0 for step in early)
    for segment in range(3, instance.config.num_layers + 2):
        instance.segment_ready(segment)
    assert [each.num_computed for step in run(instance) for each in step.prompts] == [16, 32]


def test_earliest_runnable_prompt_runs(model_of: ModelOf) -> None:
    """ZigZag: while the first batch waits for its next layer, later batches catch up; then it runs again."""
    instance = half_loaded(model_of(), 1, token_budget=16)
    for name in "ab":
        instance.prefill(group_of(prompt_of(16), f"{name}/0"))
    seen = []
    for segment in (2, 3, 4):
        while instance.has_work():
            instance.step()
            seen.append(boundaries(instance))
        instance.segment_ready(segment)
    assert seen == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]
    assert set(outputs(run(instance))) == {("a/0", 0), ("b/0", 0)}


def test_small_prompts_at_same_boundary_share_batch(model_of: ModelOf) -> None:
    instance = half_loaded(model_of(), 2, token_budget=32)
    for number in range(3):
        instance.prefill(group_of(prompt_of(16), f"{number}/0"))
    seen = []
    while instance.has_work():
        instance.step()
        seen.append(boundaries(instance))
    assert seen == [[1, 1, 0], [2, 2, 0], [2, 2, 1], [2, 2, 2]]


def test_hidden_states_of_waiting_prompts_are_bounded(model_of: ModelOf) -> None:
    """A sixteenth of the pool holds those of 64 positions here; prompts beyond it run once all weights are here."""
    model = model_of()
    whole = model.instance()
    hidden_bytes = whole.config.hidden_size * whole.model.weights.dtype.itemsize
    instance = half_loaded(model, 2, pool_bytes=16 * 64 * hidden_bytes)
    for length, name in ((40, "a/0"), (30, "too much/0"), (20, "b/0")):
        instance.prefill(group_of(prompt_of(length), name, FEW))
    run(instance)
    assert boundaries(instance) == [2, 0, 2]
    instance.cancel("a/0")
    run(instance)
    assert boundaries(instance) == [2, 2]
    for segment in (3, 4):
        instance.segment_ready(segment)
    expected = {("too much/0", 0): model.expected(prompt_of(30))[:6], ("b/0", 0): model.expected(prompt_of(20))[:6]}
    assert outputs(run(instance)) == expected
    assert_idle(instance)


def test_choices_wait_for_all_layers(model_of: ModelOf) -> None:
    """KV from another worker arrives before the weights: its choices decode afterwards, and block no prompt."""
    model = model_of()
    whole, instance = model.instance(), half_loaded(model, 1)
    group, blocks = group_of(prompt_of(20), "moved/0", FEW), {}
    whole.prefill(group, lambda block: blocks.update({block.index: bytes(block.data)}))
    [first] = [token for step in run(whole) for token in step.tokens]
    kv_import = instance.import_kv(replace(group, prompt=()), whole.kv_layout(group))
    for index, data in blocks.items():
        kv_import.write(index, data)
    kv_import.start({0: first.token_id})
    assert not instance.has_work()
    instance.prefill(group_of(prompt_of(16), sampling=FEW))
    assert outputs(run(instance)) == {}
    for segment in (2, 3, 4):
        instance.segment_ready(segment)
    actual = outputs(run(instance))
    assert [first.token_id, *actual["moved/0", 0]] == model.expected(prompt_of(20))[:6]
    assert actual["r/0", 0] == model.expected(prompt_of(16))[:6]
    assert_idle(instance)


def test_prompt_is_cancelled_or_preempted_at_any_boundary(model_of: ModelOf) -> None:
    model = model_of("qwen2")
    expected = model.expected(prompt_of(40))
    for boundary in range(4):
        for way in ("cancel", "preempt"):
            instance = half_loaded(model, boundary, token_budget=16)
            instance.prefill(group_of(prompt_of(40)))
            run(instance)
            assert boundaries(instance) == [boundary]
            if way == "cancel":
                instance.cancel("r/0")
            else:
                instance.preempt("r/0")
            instance.check_integrity()
            for segment in range(boundary + 1, 5):
                instance.segment_ready(segment)
            steps = run(instance)
            assert (outputs(steps) == {}) if way == "cancel" else (outputs(steps)["r/0", 0] == expected)
            assert_idle(instance)


def test_prompt_that_lacks_the_head_alone_is_not_delayed(model_of: ModelOf) -> None:
    """A long prompt that could not begin was admitted before it."""
    model = model_of()
    whole = model.instance()
    hidden_bytes = whole.config.hidden_size * whole.model.weights.dtype.itemsize
    instance = half_loaded(model, 3, pool_bytes=16 * 64 * hidden_bytes, token_budget=16)
    for length, name in ((90, "long/0"), (40, "short/0")):
        instance.prefill(group_of(prompt_of(length), name, FEW))
    run(instance)
    assert boundaries(instance) == [0, 3]
    instance.segment_ready(4)
    first = instance.step()
    assert [(token.group_id, token.token_id) for token in first.tokens] == [
        ("short/0", model.expected(prompt_of(40))[0])
    ]
    assert first.num_positions_prefilled == 40, "its token does not wait for a chunk of the long prompt"
    actual = outputs([first, *run(instance)])
    assert actual == {
        ("long/0", 0): model.expected(prompt_of(90))[:6],
        ("short/0", 0): model.expected(prompt_of(40))[:6],
    }
    assert_idle(instance)
