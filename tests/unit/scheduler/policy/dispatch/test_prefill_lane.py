"""How much work is ahead of a new prompt."""

from __future__ import annotations

import math

import pytest

from torchrelay.scheduler.policy.core import AttemptKey
from torchrelay.scheduler.policy.dispatch.prefill_lane import PrefillLane

A, B, C = (AttemptKey(name, 1) for name in "abc")


def test_work_shrinks_with_time_and_no_further_than_the_prompt_that_runs() -> None:
    lane = PrefillLane()
    assert (lane.ahead_s(5.0), lane.less_ahead_at(0.1)) == (0.0, 0.0)
    lane.bind(A, 1.0, now=10.0)
    lane.bind(B, 2.0, now=10.2)
    assert lane.ahead_s(10.5) == pytest.approx(2.5)
    assert lane.ahead_s(15.0) == pytest.approx(2.0), "B has not begun as long as nobody says that A is computed"
    assert lane.less_ahead_at(2.5) == pytest.approx(10.5)
    assert math.isinf(lane.less_ahead_at(2.0)), "time alone does not help"


def test_a_prompt_that_is_overdue_is_expected_to_take_as_long_again() -> None:
    lane = PrefillLane()
    lane.bind(A, 1.0, now=10.0)
    lane.bind(B, 0.5, now=10.0)
    assert [lane.overdue_s(now) for now in (10.5, 11.25, 15.0)] == pytest.approx([0.0, 0.25, 4.0])


def test_what_has_not_begun_is_all_but_the_first_and_on_an_instance_that_loads_all() -> None:
    lane = PrefillLane()
    for key, prefill_s in ((A, 1.0), (B, 2.0), (C, 0.5)):
        lane.bind(key, prefill_s, now=10.0)
    assert list(lane.not_begun(10.25, is_loading=False)) == [(B, 0.75), (C, 2.75)]
    assert list(lane.not_begun(14.0, is_loading=False)) == [(B, 3.0), (C, 5.0)]
    assert list(lane.not_begun(14.0, is_loading=True)) == [(A, 0.0), (B, 1.0), (C, 3.0)]


def test_a_report_corrects_what_was_predicted() -> None:
    lane = PrefillLane()
    lane.bind(A, 1.0, now=10.0)
    lane.bind(B, 2.0, now=10.0)
    lane.leave(A, now=10.1)  # quicker than predicted
    assert lane.ahead_s(10.1) == pytest.approx(2.0)
    lane.leave(C, now=10.1)  # unknown: nothing happens
    assert len(lane) == 1
    lane.leave(B, now=14.0)
    lane.bind(C, 0.5, now=20.0)
    assert lane.ahead_s(20.25) == pytest.approx(0.25), "a new prompt begins at once on an idle instance"


def test_a_prompt_that_leaves_behind_the_first_does_not_begin_the_first_anew() -> None:
    lane = PrefillLane()
    lane.bind(A, 1.0, now=0.0)
    lane.bind(B, 0.1, now=0.0)
    lane.leave(B, now=0.9)
    assert lane.ahead_s(0.9) == pytest.approx(0.1)


def test_on_an_instance_that_loads_nothing_has_begun() -> None:
    lane = PrefillLane()
    lane.bind(A, 1.0, now=10.0)
    lane.bind(B, 1.0, now=11.0)
    assert lane.work_s() == pytest.approx(2.0)
    lane.resume(now=30.0)
    assert lane.ahead_s(30.5) == pytest.approx(1.5)


def test_pauses_add_up_to_a_decode_step_and_pass_while_no_prompt_is_bound() -> None:
    lane = PrefillLane()
    lane.bind(A, 1.0, now=10.0, pause_s=0.15)
    assert lane.paused_s(0.2, now=10.5) == 0.0, "less than a step"
    lane.bind(B, 1.0, now=10.5, pause_s=0.15)
    assert lane.paused_s(0.2, now=10.5) == pytest.approx(0.1)
    lane.leave(A, now=11.0)
    assert lane.paused_s(0.2, now=11.9) == pytest.approx(0.1), "B is computed meanwhile"
    lane.leave(B, now=12.0)
    assert lane.paused_s(0.2, now=12.04) == pytest.approx(0.06)
    assert lane.paused_s(0.2, now=12.1) == pytest.approx(0.0)
    lane.bind(C, 1.0, now=12.1, pause_s=0.1)
    assert lane.paused_s(0.2, now=12.1) == pytest.approx(0.1), "a step was owed yet"


def test_pauses_pass_beside_a_prompt_that_is_overdue() -> None:
    """They were owed for ever to answers beside a prompt that never ended."""
    lane = PrefillLane()
    lane.bind(A, 1.0, now=10.0, pause_s=0.3)
    assert lane.paused_s(0.1, now=10.9) == pytest.approx(0.2)
    assert lane.paused_until(0.1) == pytest.approx(11.2)
    assert lane.paused_s(0.1, now=11.15) == pytest.approx(0.05)
    assert lane.paused_s(0.1, now=11.2) == pytest.approx(0.0)
    lane.bind(B, 1.0, now=11.3, pause_s=0.3)
    assert lane.paused_until(0.1) == pytest.approx(12.2), "nothing of A's pause is owed any more"
