"""Prompts on an instance whose weights are still arriving end by cancels, by deadlines, and with a load that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.harness import (
    Clock,
    ModelOf,
    assert_idle,
    export_prefill,
    group_of,
    half_loaded,
    import_prefill,
    outputs,
    prompt_of,
    run,
)
from torchrelay.engine.core import GroupSpec, LoadFailed
from torchrelay.engine.instance import Instance
from torchrelay.engine.weights.segment_gate import SegmentGate

PROMPT = prompt_of(40)
SOON_S = 0.05


def load_rest(instance: Instance) -> None:
    for segment in range(instance.num_segments_ready, instance.config.num_layers + 2):
        instance.segment_ready(segment)


def ending(group: GroupSpec, why: str) -> GroupSpec:
    return replace(group, deadline_s=Clock.now_s + SOON_S) if why == "deadline" else group


@pytest.mark.parametrize("why", ["cancel", "deadline"])
@pytest.mark.parametrize("num_layers", [-1, 0, 2, 3])
def test_group_that_waits_for_weights_ends(model_of: ModelOf, num_layers: int, why: str) -> None:
    """The groups wait for the embeddings, a layer, or the head."""
    model, clock = model_of("gemma3"), Clock()
    instance = half_loaded(model, num_layers, clock=clock)
    instance.prefill(group_of(prompt_of(17), "before/0"))
    instance.prefill(ending(group_of(PROMPT, "ends/0"), why))
    instance.prefill(group_of(prompt_of(20), "after/0", forced=[(), (5,)]))
    assert outputs(run(instance)) == {}
    num_free = instance.num_free_pages
    clock.now_s += SOON_S
    if why == "cancel":
        instance.cancel_soon("ends/0")
        instance.cancel_soon("after/0", 1)
        instance.cancel_soon("unknown/0")
    step = instance.step()
    assert instance.num_free_pages >= num_free + 4  # pages of 16 tokens for a prompt of 40 and 23 more
    assert step.expired == (("ends/0",) if why == "deadline" else ())
    load_rest(instance)
    actual = outputs(run(instance))
    assert (("after/0", 1) in actual) == (why == "deadline")
    actual.pop(("after/0", 1), None)
    assert actual == {
        ("before/0", 0): model.expected(prompt_of(17)),
        ("after/0", 0): model.expected(prompt_of(20)),
    }
    assert_idle(instance)


def test_imported_prompt_needs_no_embeddings_but_for_a_tied_head(model_of: ModelOf) -> None:
    model = model_of(tied=True)
    source, target = half_loaded(model, 1), model.instance(loaded=False)
    assert target.config.tied_embeddings
    for segment in range(1, target.config.num_layers + 2):
        target.segment_ready(segment)
    source.prefill(group_of(PROMPT))
    run(source)
    import_prefill(target, export_prefill(source))
    assert outputs(run(target)) == {}
    assert [group.layer for group in target.groups()] == [target.config.num_layers]
    target.segment_ready(0)
    assert outputs(run(target))["r/0", 0] == model.expected(PROMPT)
    assert_idle(target)


def test_group_waiting_for_pages_expires_during_load(model_of: ModelOf) -> None:
    model, clock = model_of(), Clock()
    instance = half_loaded(model, 1, num_pages=5, clock=clock)
    instance.prefill(group_of(PROMPT))
    instance.prefill(ending(group_of(PROMPT, "late/0"), "deadline"))
    run(instance)
    clock.now_s += SOON_S
    assert instance.max_sleep_s() == 0
    assert instance.step().expired == ("late/0",)
    load_rest(instance)
    assert outputs(run(instance)).keys() == {("r/0", 0)}


def test_prompt_fails_with_its_load(model_of: ModelOf) -> None:
    """The prompt waits without a step; without work after the failure it would wait forever."""
    instance = half_loaded(model_of(), 1)
    instance.prefill(group_of(PROMPT))
    run(instance)
    instance.fail("no holder is left")
    assert instance.has_work()
    with pytest.raises(LoadFailed, match=r"segment 2 .* no holder is left"):
        instance.step()
    instance.check_integrity()
    instance.cancel("r/0")
    assert_idle(instance)


def test_gate_notifies_every_change() -> None:
    gate, changes = SegmentGate(2), []
    gate.on_change = lambda: changes.append((gate.num_open, gate.all_settled))
    gate.open(0)
    gate.open(0)
    gate.fail("no more")
    assert changes == [(1, False), (1, True)]


def test_closed_segment_raises_with_the_reason() -> None:
    gate = SegmentGate(2)
    gate.open(0)
    gate.require(0)
    with pytest.raises(LoadFailed, match=r"segment 1 .* still to come"):
        gate.require(1)
    gate.fail("no holder is left")
    gate.require(0)
    with pytest.raises(LoadFailed, match=r"segment 1 .* no holder is left"):
        gate.require(1)
