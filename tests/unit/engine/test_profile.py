"""The time of a step by activity: it adds up to the step, and each part counts for its activity."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from tests.unit.engine.harness import Model, group_of, hand_over, prompt_of, run
from torchrelay.common.latency.latency_model import StepWork, attended_positions
from torchrelay.engine import profile
from torchrelay.engine.core import ChoiceSpec, GroupSpec, LoadFailed, SamplingParams, StepProfile
from torchrelay.engine.execution import stepper
from torchrelay.engine.kernels.backends import backends_for
from torchrelay.engine.profile import Activity


@pytest.fixture
def counted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by a second per reading, however busy the machine is."""
    numbers = count()

    def reading() -> float:
        return float(next(numbers))

    monkeypatch.setattr(profile, "perf_counter", reading)
    monkeypatch.setattr(stepper, "time", SimpleNamespace(perf_counter=reading))


@pytest.mark.usefixtures("counted_clock")
def test_time_counts_for_one_activity_at_a_time() -> None:
    profile.take()
    profile.enter(Activity.COMPUTE)
    before = profile.enter(Activity.MEMORY)
    assert before is Activity.COMPUTE
    assert profile.enter(before) is Activity.MEMORY
    assert profile.take() == StepProfile(compute_s=2.0, memory_s=1.0)
    assert profile.take() == StepProfile()  # between steps nothing is counted


def test_each_thread_has_its_own_stopwatch() -> None:
    profile.take()
    thread = threading.Thread(target=lambda: profile.enter(Activity.MEMORY))
    thread.start()
    thread.join()
    assert profile.take() == StepProfile()


@pytest.mark.usefixtures("counted_clock")
def test_shares_add_up_to_step_duration(model_of: Callable[..., Model]) -> None:
    instance = model_of().instance(token_budget=64, backends=backends_for(torch.device("cpu"), "gather"))
    for number in range(16):
        instance.prefill(group_of(prompt_of(40, number), f"r{number}/0"))
    steps = run(instance)
    for step in steps:
        assert step.profile.total_s == step.step_s
        assert step.profile.compute_s > 0 and step.profile.scheduling_s > 0
        assert step.profile.io_wait_s == step.profile.kv_transfer_s == 0
    assert steps[0].profile.memory_s == 0, "short contexts are not timed"
    assert max(steps, key=lambda step: step.work.num_decode_attended).profile.memory_s > 0


def test_step_reports_its_work(model_of: Callable[..., Model]) -> None:
    instance = model_of().instance(token_budget=32)
    instance.prefill(group_of(prompt_of(40), sampling=SamplingParams(temperature=0, max_tokens=3)))
    first, second, third, last = [step.work for step in run(instance)]
    assert first == StepWork(32, attended_positions(0, 32))
    assert second == StepWork(8, attended_positions(32, 40))
    assert (third, last) == (
        StepWork(num_decoding=1, num_decode_attended=41),
        StepWork(num_decoding=1, num_decode_attended=42),
    )


@pytest.mark.usefixtures("counted_clock")
def test_time_between_steps_is_io_wait_while_prompts_wait_for_weights(model_of: Callable[..., Model]) -> None:
    model = model_of()
    instance = model.instance(loaded=False)
    instance.prefill(group_of(prompt_of(8), "ends/0"))
    assert run(instance)[-1].profile.io_wait_s == 0
    instance.cancel("ends/0")
    instance.prefill(group_of(prompt_of(8)))
    assert all(step.profile.io_wait_s == 0 for step in run(instance))
    steps = []
    for segment in range(len(model.pack.manifest.segments)):
        instance.segment_ready(segment)
        steps += run(instance)
    assert len([step for step in steps if step.profile.io_wait_s > 0]) == instance.config.num_layers + 1
    assert steps[-1].profile.io_wait_s == 0  # it decodes


@pytest.mark.usefixtures("counted_clock")
def test_failed_step_adds_no_time_to_next_step(model_of: Callable[..., Model]) -> None:
    model = model_of()
    broken = model.instance(loaded=False)
    broken.prefill(group_of(prompt_of(8)))
    broken.fail("the disk is gone")
    with pytest.raises(LoadFailed):
        broken.step()
    instance = model.instance()
    instance.prefill(group_of(prompt_of(8)))
    assert instance.step().profile.io_wait_s == 0


@pytest.mark.usefixtures("counted_clock")
def test_hand_over_counts_as_kv_transfer_on_both_sides(model_of: Callable[..., Model]) -> None:
    model = model_of()
    source, target = model.instance(), model.instance()
    profile.take()
    group = GroupSpec("r/0", prompt_of(40), 40, SamplingParams(temperature=0, max_tokens=4), (ChoiceSpec(0),))
    prefilled, (first, *others) = hand_over(source, target, group)
    assert prefilled.profile.kv_transfer_s > 0
    assert prefilled.profile.total_s == prefilled.step_s
    assert first.profile.kv_transfer_s > 0, "the import before the step"
    assert first.profile.total_s - first.profile.kv_transfer_s == first.step_s
    assert all(step.profile.kv_transfer_s == 0 for step in others)
