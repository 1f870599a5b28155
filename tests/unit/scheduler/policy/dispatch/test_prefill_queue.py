"""How much work is ahead of a new prompt."""

from __future__ import annotations

import math

import pytest

from torchrelay.scheduler.policy.dispatch.prefill_queue import PrefillQueue
from torchrelay.scheduler.policy.types import AttemptKey

A, B, C = (AttemptKey(name, 1) for name in "abc")


def test_work_shrinks_with_time_of_running_prompt_only() -> None:
    queue = PrefillQueue()
    assert (queue.ahead_s(5.0), queue.less_ahead_at(0.1)) == (0.0, 0.0)
    queue.add(A, 1.0, now=10.0)
    queue.add(B, 2.0, now=10.2)
    assert queue.ahead_s(10.5) == pytest.approx(2.5)
    assert queue.ahead_s(15.0) == pytest.approx(2.0), "B has not begun as long as nobody says that A is computed"
    assert queue.less_ahead_at(2.5) == pytest.approx(10.5)
    assert math.isinf(queue.less_ahead_at(2.0)), "time alone does not help"


def test_overdue_prompt_is_expected_as_long_again() -> None:
    queue = PrefillQueue()
    queue.add(A, 1.0, now=10.0)
    queue.add(B, 0.5, now=10.0)
    assert [queue.overdue_s(now) for now in (10.5, 11.25, 15.0)] == pytest.approx([0.0, 0.25, 4.0])


def test_not_begun_excludes_first_unless_loading() -> None:
    queue = PrefillQueue()
    for key, prefill_s in ((A, 1.0), (B, 2.0), (C, 0.5)):
        queue.add(key, prefill_s, now=10.0)
    assert list(queue.not_begun(10.25, is_loading=False)) == [(B, 0.75), (C, 2.75)]
    assert list(queue.not_begun(14.0, is_loading=False)) == [(B, 3.0), (C, 5.0)]
    assert list(queue.not_begun(14.0, is_loading=True)) == [(A, 0.0), (B, 1.0), (C, 3.0)]


def test_report_corrects_prediction() -> None:
    queue = PrefillQueue()
    queue.add(A, 1.0, now=10.0)
    queue.add(B, 2.0, now=10.0)
    queue.leave(A, now=10.1)  # quicker than predicted
    assert queue.ahead_s(10.1) == pytest.approx(2.0)
    queue.leave(C, now=10.1)  # unknown: nothing happens
    assert len(queue) == 1
    queue.leave(B, now=14.0)
    queue.add(C, 0.5, now=20.0)
    assert queue.ahead_s(20.25) == pytest.approx(0.25), "a new prompt begins at once on an idle instance"


def test_leaving_prompt_does_not_restart_first() -> None:
    queue = PrefillQueue()
    queue.add(A, 1.0, now=0.0)
    queue.add(B, 0.1, now=0.0)
    queue.leave(B, now=0.9)
    assert queue.ahead_s(0.9) == pytest.approx(0.1)


def test_on_an_instance_that_loads_nothing_has_begun() -> None:
    queue = PrefillQueue()
    queue.add(A, 1.0, now=10.0)
    queue.add(B, 1.0, now=11.0)
    assert queue.work_s() == pytest.approx(2.0)
    queue.resume(now=30.0)
    assert queue.ahead_s(30.5) == pytest.approx(1.5)


def test_loading_instance_has_computed_the_layers_that_it_has() -> None:
    queue = PrefillQueue()
    assert queue.left_by_layer_s(0.5, 10.0) == 0.0
    queue.add(A, 1.0, now=10.0)
    queue.add(B, 2.0, now=10.0)
    assert queue.left_by_layer_s(0.5, 10.4) == pytest.approx(2.6), "one prompt at a time"
    assert queue.left_by_layer_s(0.5, 12.0) == pytest.approx(1.5), "it waits for the other layers"
    queue.add(C, 1.0, now=12.0)
    assert [queue.left_by_layer_s(0.5, now) for now in (12.0, 12.1, 14.0)] == pytest.approx([2.5, 2.4, 2.0])
    queue.leave(A, now=14.0)
    assert queue.left_by_layer_s(1.0, 14.0) == pytest.approx(0.0)


def test_pauses_accumulate_and_pass_without_prompts() -> None:
    queue = PrefillQueue()
    queue.add(A, 1.0, now=10.0, pause_s=0.15)
    assert queue.paused_s(0.2, now=10.5) == 0.0, "less than a step"
    queue.add(B, 1.0, now=10.5, pause_s=0.15)
    assert queue.paused_s(0.2, now=10.5) == pytest.approx(0.1)
    queue.leave(A, now=11.0)
    assert queue.paused_s(0.2, now=11.9) == pytest.approx(0.1), "B is computed meanwhile"
    queue.leave(B, now=12.0)
    assert queue.paused_s(0.2, now=12.04) == pytest.approx(0.06)
    assert queue.paused_s(0.2, now=12.1) == pytest.approx(0.0)
    queue.add(C, 1.0, now=12.1, pause_s=0.1)
    assert queue.paused_s(0.2, now=12.1) == pytest.approx(0.1), "a step was owed yet"


def test_pauses_pass_beside_a_prompt_that_is_overdue() -> None:
    """They were owed for ever to answers beside a prompt that never ended."""
    queue = PrefillQueue()
    queue.add(A, 1.0, now=10.0, pause_s=0.3)
    assert queue.paused_s(0.1, now=10.9) == pytest.approx(0.2)
    assert queue.paused_until(0.1) == pytest.approx(11.2)
    assert queue.paused_s(0.1, now=11.15) == pytest.approx(0.05)
    assert queue.paused_s(0.1, now=11.2) == pytest.approx(0.0)
    queue.add(B, 1.0, now=11.3, pause_s=0.3)
    assert queue.paused_until(0.1) == pytest.approx(12.2), "nothing of A's pause is owed any more"
