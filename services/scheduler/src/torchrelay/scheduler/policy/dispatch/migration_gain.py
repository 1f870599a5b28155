"""Choice of the running answers to migrate: those whose move gains more than it costs.

A migrated answer is prefilled again with its output so far, which costs a pause and device time. So answers leave a
draining instance only if that ends the drain sooner by more than the cost, and leave an instance whose tokens take too
long only if its tokens, and those of the answers that stay, come sooner by more than the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchrelay.scheduler.policy.core import AttemptKey


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """A running answer and the time that its instance is expected to need for the rest."""

    key: AttemptKey
    num_given: float  # tokens
    num_left: float
    tbt_s: float

    @property
    def left_s(self) -> float:
        return self.num_left * self.tbt_s


def num_tokens_left(num_given: float, num_expected: int, max_tokens: int) -> float:
    """Tokens left of an answer. An answer that exceeds the expected length is expected to exceed it by as much
    again.
    """
    return max(min(abs(num_expected - num_given), max_tokens - num_given), 0.0)


def worth_draining(
    answers: Iterable[RunningAnswer],
    cost_s: Callable[[RunningAnswer], float],
    stays_s: float,
    cut_off_s: float,
    least_gain_s: float,
) -> tuple[RunningAnswer, ...]:
    """Answers to move from a draining instance, the longest first: as many as gain most, above ``least_gain_s``.

    gain = time left of the drain - time left of it without these answers - the sum of their costs

    ``cost_s`` is called for as few answers as possible; infinite if the answer cannot move. The drain takes ``stays_s``
    in any case. An answer that still runs after ``cut_off_s`` is cut off and prefilled again elsewhere anyway, so its
    move is free.
    """
    ordered = sorted(answers, key=lambda answer: (-answer.left_s, answer.key))
    ends_s = [min(answer.left_s, cut_off_s) for answer in ordered]
    best_gain_s, num_best, costs_s = least_gain_s, 0, 0.0
    for number, answer in enumerate(ordered, 1):
        if ends_s[0] - costs_s <= best_gain_s:
            break  # no gain is left even if the drain ended at once
        own_s = cost_s(answer)
        costs_s += own_s if answer.left_s < cut_off_s or math.isinf(own_s) else 0.0
        left_s = ends_s[number] if number < len(ordered) else 0.0
        gain_s = ends_s[0] - max(left_s, min(stays_s, cut_off_s)) - costs_s
        if gain_s > best_gain_s:
            best_gain_s, num_best = gain_s, number
    return tuple(ordered[:num_best])


def lateness_gain_s(
    answer: RunningAnswer, others: Sequence[RunningAnswer], tbt_s: float, target_s: float, share_s: float
) -> float:
    """Reduction of the lateness of an instance's tokens if ``answer`` moves to an instance that meets the target.

    gain = (TBT - target) x its tokens left + min(its share of a step, TBT - target) x tokens of ``others`` meanwhile
    """
    late_s = max(tbt_s - target_s, 0.0)
    num_others_left = sum(min(other.num_left, answer.num_left) for other in others)
    return late_s * answer.num_left + min(share_s, late_s) * num_others_left
