"""A step that waits for weights reacts to the end of its groups: cancels, deadlines, a load that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.support.wait import HANG_S, wait_until
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
from torchrelay.common.latency.latency_model import NO_WORK
from torchrelay.engine.core import GroupSpec, LoadFailed, StepResult
from torchrelay.engine.instance import Instance
from torchrelay.engine.weights.segment_gate import SegmentGate

PROMPT = prompt_of(40)
SOON_S = 0.05


class Engine:
    """A thread for steps that wait."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.instances: list[Instance] = []

    def waiting_step(self, instance: Instance) -> Future[StepResult]:
        """A step that has begun to wait for a segment."""
        self.instances.append(instance)
        gate, waits = instance.model.weights.gate, threading.Event()
        inner = gate.wait

        def wait(segment: int, *how: Any) -> Any:
            if not gate.is_open(segment):
                waits.set()
            return inner(segment, *how)

        gate.wait = wait  # type: ignore[method-assign, assignment]
        step = self._pool.submit(instance.step)
        assert waits.wait(HANG_S)
        return step


@pytest.fixture
def engine() -> Iterator[Engine]:
    with ThreadPoolExecutor(1) as pool:
        engine = Engine(pool)
        yield engine
        for instance in engine.instances:
            instance.fail("the test is over")


def load_rest(instance: Instance) -> None:
    for segment in range(instance.num_segments_ready, instance.config.num_layers + 2):
        instance.segment_ready(segment)


def ending(group: GroupSpec, why: str) -> GroupSpec:
    return replace(group, deadline_s=Clock.now_s + SOON_S) if why == "deadline" else group


@pytest.mark.parametrize("why", ["cancel", "deadline"])
@pytest.mark.parametrize("num_layers", [-1, 0, 2, 3])
def test_step_stops_waiting_when_whole_batch_ends(model_of: ModelOf, engine: Engine, num_layers: int, why: str) -> None:
    """The step waits for the embeddings, a layer, or the head."""
    model, clock = model_of(), Clock()
    instance = half_loaded(model, num_layers, clock=clock)
    instance.prefill(ending(group_of(PROMPT), why))
    step = engine.waiting_step(instance)
    clock.now_s += SOON_S
    if why == "cancel":
        instance.cancel_soon("r/0")
    result = step.result(HANG_S)
    assert result.expired == (("r/0",) if why == "deadline" else ())
    assert not result.tokens and not result.prefilled
    assert result.num_positions_prefilled == 0 and result.work == NO_WORK  # nothing was computed to the end
    assert_idle(instance)
    load_rest(instance)
    instance.prefill(group_of(PROMPT))
    assert outputs(run(instance))["r/0", 0] == model.expected(PROMPT)


@pytest.mark.parametrize("why", ["cancel", "deadline"])
def test_imported_prompt_stops_waiting_for_tied_embeddings(model_of: ModelOf, engine: Engine, why: str) -> None:
    model, clock = model_of(tied=True), Clock()
    source, target = half_loaded(model, 1), model.instance(loaded=False, clock=clock)
    assert target.config.tied_embeddings
    for segment in range(1, target.config.num_layers + 2):
        target.segment_ready(segment)
    source.prefill(group_of(PROMPT), until=3)
    run(source)
    exported = export_prefill(source)
    late = replace(exported, left_s=SOON_S) if why == "deadline" else exported
    import_prefill(target, late, now_s=clock.now_s)
    step = engine.waiting_step(target)
    clock.now_s += SOON_S
    if why == "cancel":
        target.cancel_soon("r/0")
    result = step.result(HANG_S)
    assert result.expired == (("r/0",) if why == "deadline" else ())
    assert not result.tokens
    assert_idle(target)
    import_prefill(target, exported, now_s=clock.now_s)
    step = engine.waiting_step(target)
    target.segment_ready(0)
    assert outputs([step.result(HANG_S), *run(target)])["r/0", 0] == model.expected(PROMPT)


@pytest.mark.parametrize("why", ["cancel", "deadline"])
@pytest.mark.parametrize("num_layers", [-1, 0, 2, 3])
def test_ended_group_frees_pages_while_others_wait(
    model_of: ModelOf, engine: Engine, num_layers: int, why: str
) -> None:
    model, clock = model_of("gemma3"), Clock()
    instance = half_loaded(model, num_layers, clock=clock)
    instance.prefill(group_of(prompt_of(17), "before/0"))
    instance.prefill(ending(group_of(PROMPT, "ends/0"), why))
    instance.prefill(group_of(prompt_of(20), "after/0", forced=[(), (5,)]))
    step = engine.waiting_step(instance)
    num_free = instance.num_free_pages
    clock.now_s += SOON_S
    if why == "cancel":
        instance.cancel_soon("ends/0")
        instance.cancel_soon("after/0", 1)
        instance.cancel_soon("unknown/0")
    wait_until(lambda: instance.num_free_pages >= num_free + 4)  # pages of 16 tokens for a prompt of 40 and 23 more
    assert not step.done()
    load_rest(instance)
    steps = [step.result(HANG_S), *run(instance)]
    assert steps[0].expired == (("ends/0",) if why == "deadline" else ())
    actual = outputs(steps)
    assert (("after/0", 1) in actual) == (why == "deadline")
    actual.pop(("after/0", 1), None)
    assert actual == {
        ("before/0", 0): model.expected(prompt_of(17)),
        ("after/0", 0): model.expected(prompt_of(20)),
    }
    assert_idle(instance)


def test_group_waiting_for_pages_expires_during_wait(model_of: ModelOf, engine: Engine) -> None:
    model, clock = model_of(), Clock()
    instance = half_loaded(model, 1, num_pages=5, clock=clock)
    instance.prefill(group_of(PROMPT))
    instance.prefill(ending(group_of(PROMPT, "late/0"), "deadline"))
    step = engine.waiting_step(instance)
    clock.now_s += SOON_S
    wait_until(lambda: len(instance.groups()) == 1)
    assert not step.done()
    load_rest(instance)
    assert step.result(HANG_S).expired == ("late/0",)
    assert outputs(run(instance)).keys() == {("r/0", 0)}


def test_failed_load_ends_wait_of_remaining_groups(model_of: ModelOf, engine: Engine) -> None:
    instance = half_loaded(model_of(), 1)
    for name in ("ends/0", "stays/0"):
        instance.prefill(group_of(PROMPT, name))
    step = engine.waiting_step(instance)
    num_free = instance.num_free_pages
    instance.cancel_soon("ends/0")
    wait_until(lambda: instance.num_free_pages > num_free)
    instance.fail("no holder is left")
    with pytest.raises(LoadFailed, match=r"segment 2 .* no holder is left"):
        step.result(HANG_S)
    instance.check_integrity()
    instance.cancel("stays/0")
    assert_idle(instance)


def test_layer_by_layer_prompt_fails_with_its_load(model_of: ModelOf) -> None:
    """The prompt waits without a step; without the notification it would wait forever."""
    instance = half_loaded(model_of(), 1)
    instance.prefill(group_of(PROMPT), until=3)
    run(instance)
    instance.fail("no holder is left")
    assert instance.has_work()
    with pytest.raises(LoadFailed, match=r"segment 2 .* no holder is left"):
        instance.step()
    instance.check_integrity()


def test_gate_notifies_every_change() -> None:
    gate, changes = SegmentGate(2), []
    gate.on_change = lambda: changes.append((gate.num_open, gate.is_settled(1)))
    gate.open(0)
    gate.open(0)
    gate.fail("no more")
    assert changes == [(1, False), (1, True)]


def test_wait_ends_at_timeout_or_reason_to_stop() -> None:
    gate, reasons = SegmentGate(1), [False, False, True]
    assert not gate.wait(0, 0.01)
    assert not gate.wait(0, None, lambda: True)
    with ThreadPoolExecutor(1) as pool:
        woken = pool.submit(gate.wait, 0, None, lambda: reasons.pop(0))
        wait_until(lambda: len(reasons) == 2)
        assert not woken.done()
        gate.wake()
        wait_until(lambda: len(reasons) == 1)
        assert not woken.done()
        gate.wake()
        assert woken.result(HANG_S) is False
        opened = pool.submit(gate.wait, 0, 1e300)
        gate.open(0)
        assert opened.result(HANG_S) is True
