"""The answers that migrate, and their gain."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.scheduler.policy.core import AttemptKey
from torchrelay.scheduler.policy.dispatch.migration_gain import (
    RunningAnswer,
    lateness_gain_s,
    num_tokens_left,
    worth_draining,
)


def answers(*lefts_s: float) -> list[RunningAnswer]:
    return [RunningAnswer(AttemptKey(f"r{n}", 1), 10.0, left_s * 10, 0.1) for n, left_s in enumerate(lefts_s)]


def leaving(
    running: list[RunningAnswer],
    costs_s: float | dict[str, float],
    stays_s: float = 0.0,
    cut_off_s: float = math.inf,
    least_gain_s: float = 0.5,
) -> list[str]:
    def cost_s(answer: RunningAnswer) -> float:
        return costs_s.get(answer.key.request_id, 0.1) if isinstance(costs_s, dict) else costs_s

    return [answer.key.request_id for answer in worth_draining(running, cost_s, stays_s, cut_off_s, least_gain_s)]


@pytest.mark.parametrize(
    ("num_given", "num_expected", "max_tokens", "num_left"),
    [(0, 100, 400, 100), (60, 100, 400, 40), (150, 100, 400, 50), (350, 100, 400, 50), (400, 100, 400, 0)],
)
def test_overlong_answer_is_expected_as_long_again(
    num_given: float, num_expected: int, max_tokens: int, num_left: float
) -> None:
    assert num_tokens_left(num_given, num_expected, max_tokens) == num_left


def test_all_answers_leave_if_each_shortens_drain() -> None:
    assert leaving(answers(3.0, 10.0, 6.0), 0.5) == ["r1", "r2", "r0"]


def test_only_longest_answer_leaves_if_others_end_soon() -> None:
    assert leaving(answers(1.0, 10.0, 1.0), 0.6) == ["r1"]


def test_answers_stay_for_small_gain() -> None:
    assert leaving(answers(1.0), 0.6) == []
    assert leaving(answers(4.0, 4.0, 4.0, 4.0), 1.0) == [], (
        "each move costs less than a drain of 4 s, all together as much"
    )


def test_longer_staying_work_keeps_answers() -> None:
    assert leaving(answers(10.0, 9.0), {"r0": math.inf}) == []
    assert leaving(answers(10.0, 9.0, 3.0), {"r1": math.inf}) == ["r0"]
    assert leaving(answers(10.0, 9.0), 0.1, stays_s=9.8) == []
    assert leaving(answers(10.0, 9.0), 0.1, stays_s=5.0) == ["r0", "r1"]


def test_move_of_cut_off_answer_is_free() -> None:
    assert leaving(answers(40.0, 1.0), 5.0, cut_off_s=4.0) == ["r0"]
    assert leaving(answers(3.9, 1.0), 5.0, cut_off_s=4.0) == []
    assert leaving(answers(40.0), math.inf, cut_off_s=4.0) == []
    assert leaving(answers(40.0), 0.1, cut_off_s=0.4) == []


@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0, 10)), max_size=12), st.floats(0, 30), st.floats(0, 30))
def test_chosen_number_of_answers_gains_most(
    drawn: list[tuple[float, float]], stays_s: float, cut_off_s: float
) -> None:
    running = answers(*(left_s for left_s, _ in drawn))
    costs_s = {answer.key.request_id: cost_s for answer, (_, cost_s) in zip(running, drawn, strict=True)}

    def gain_s(number: int) -> float:
        ordered = sorted(running, key=lambda answer: (-answer.left_s, answer.key))
        ends_s = [min(answer.left_s, cut_off_s) for answer in ordered]
        moved_s = sum(costs_s[answer.key.request_id] for answer in ordered[:number] if answer.left_s < cut_off_s)
        return max([*ends_s, min(stays_s, cut_off_s)]) - max([*ends_s[number:], min(stays_s, cut_off_s)]) - moved_s

    chosen = leaving(running, costs_s, stays_s, cut_off_s)
    best_s = max(gain_s(number) for number in range(len(running) + 1))
    assert gain_s(len(chosen)) == pytest.approx(best_s) if chosen else best_s <= 0.5 + 1e-9


def test_lateness_gain_counts_own_tokens_and_share_of_others() -> None:
    first, second, third = (
        RunningAnswer(AttemptKey(name, 1), 0.0, left, 0.15) for name, left in zip("abc", (100, 40, 300), strict=True)
    )
    assert lateness_gain_s(first, [], 0.15, 0.1, 0.01) == pytest.approx(5.0)
    assert lateness_gain_s(first, [second, third], 0.15, 0.1, 0.01) == pytest.approx(5.0 + 0.01 * (40 + 100))
    assert lateness_gain_s(first, [second, third], 0.104, 0.1, 0.01) == pytest.approx(0.4 + 0.004 * (40 + 100))
    assert lateness_gain_s(first, [second, third], 0.09, 0.1, 0.01) == 0.0
