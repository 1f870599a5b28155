"""Which requests are late where not all can be in time, and in what order the late ones are served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from torchrelay.scheduler.policy.core import Admission, AttemptKey

_PROMPT_PRICE = 150.0  # of a second of a late prompt, in seconds by which it is late


class TimedPrompt(NamedTuple):
    """``prompt_s``: of an instance. ``may_be_late``: others may go first for which it is late then."""

    key: AttemptKey
    deadline: float
    prompt_s: float
    may_be_late: bool = True


def fewest_late(prompts: Iterable[TimedPrompt], free_at: Sequence[float], share: float = 1.0) -> list[AttemptKey]:
    """Fewest prompts without which all others are in time. ``prompts`` are ordered by deadline. Where a deadline would
    be missed, the longest prompt so far is late (Moore, 1968, by Hodgson's rule, which is exact for one
    machine). A prompt that may not be late, and is in any case, makes no other late.

    ``free_at``: when each instance is free, in ascending order. The instances spend ``share`` of their time on these
    prompts.
    """
    late: list[AttemptKey] = []
    longest_first: list[tuple[float, int, AttemptKey]] = []
    before_s = 0.0
    for number, prompt in enumerate(prompts):
        is_late_alone = free_at[0] + prompt.prompt_s > prompt.deadline
        if is_late_alone and prompt.may_be_late:
            late.append(prompt.key)
            continue
        ends_at = _computed_at(before_s / share, free_at) + prompt.prompt_s
        before_s += prompt.prompt_s
        if prompt.may_be_late:
            heappush(longest_first, (-prompt.prompt_s, number, prompt.key))
        if ends_at > prompt.deadline and not is_late_alone and longest_first:
            longest_s, _, key = heappop(longest_first)
            before_s += longest_s
            late.append(key)
    return late


def _computed_at(work_s: float, free_at: Sequence[float]) -> float:
    """When the instances together have done ``work_s`` of work."""
    sum_at = 0.0
    for number, at in enumerate(free_at, 1):
        sum_at += at
        computed_at = (work_s + sum_at) / number
        if number < len(free_at) and computed_at <= free_at[number]:
            break
    return computed_at


def late_rank(admission: Admission, prompt_s: float) -> float:
    """The rank by which late requests are served, lowest first: a short prompt goes before a long one unless the long
    one's deadline is earlier by more than ``_PROMPT_PRICE`` times the difference in prompt seconds. Ranks are fixed, so
    each request becomes the first of all.
    """
    return admission.deadline + _PROMPT_PRICE * prompt_s
