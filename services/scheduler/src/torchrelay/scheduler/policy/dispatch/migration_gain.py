"""Which running answers go on elsewhere: those whose move gains more than it costs.

An answer that moves is prefilled again, with its output so far: it pauses for that time, and a device spends it. So an
instance is emptied by moves only as far as that ends its drain sooner by more, and one whose tokens take too long is
rid of an answer only if its tokens, and those of the answers that stay, come sooner by more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchrelay.scheduler.policy.core import AttemptKey


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """An answer as its instance is expected to end it."""

    key: AttemptKey
    num_given: float  # tokens
    num_left: float
    tbt_s: float

    @property
    def left_s(self) -> float:
        return self.num_left * self.tbt_s


def num_tokens_left(num_given: float, num_expected: int, max_tokens: int) -> float:
    """Tokens left of an answer. One longer than expected is expected to go on for as long again as it is longer."""
    return max(min(abs(num_expected - num_given), max_tokens - num_given), 0.0)


def worth_draining(
    answers: Iterable[RunningAnswer],
    cost_s: Callable[[RunningAnswer], float],
    stays_s: float,
    cut_off_s: float,
    least_gain_s: float,
) -> tuple[RunningAnswer, ...]:
    """Answers to move from a draining instance, the longest first: as many as gain most, above ``least_gain_s``.

    gain = what is left of the drain - what is left of it without them - the sum of their costs

    ``cost_s`` is called for as few answers as possible; infinite: the answer cannot move. The drain takes
    ``stays_s`` in any case. An answer that still runs after ``cut_off_s`` is cut off and prefilled again elsewhere: its
    move costs nothing more now.
    """
    ordered = sorted(answers, key=lambda answer: (-answer.left_s, answer.key))
    ends_s = [min(answer.left_s, cut_off_s) for answer in ordered]
    best_gain_s, num_best, costs_s = least_gain_s, 0, 0.0
    for number, answer in enumerate(ordered, 1):
        if ends_s[0] - costs_s <= best_gain_s:
            break  # even if the drain were over
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
    """How much less late the tokens of an instance are without ``answer``, which goes where the target is met.

    gain = (TBT - target) x its tokens left + min(its share of a step, TBT - target) x those of ``others`` meanwhile
    """
    late_s = max(tbt_s - target_s, 0.0)
    num_others_left = sum(min(other.num_left, answer.num_left) for other in others)
    return late_s * answer.num_left + min(share_s, late_s) * num_others_left
