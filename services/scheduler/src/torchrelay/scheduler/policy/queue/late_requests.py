"""Choice of the late requests if not all can be in time, and their order of service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from torchrelay.scheduler.policy.types import Admission, AttemptKey

_PROMPT_PRICE = 150.0  # seconds of lateness that a second of prompt time outweighs in the rank of late requests


class TimedPrompt(NamedTuple):
    """A prompt with its time on an instance. ``may_be_late``: it may be chosen as late."""

    key: AttemptKey
    deadline: float
    prompt_s: float
    may_be_late: bool = True


def fewest_late(prompts: Iterable[TimedPrompt], free_at: Sequence[float], share: float = 1.0) -> list[AttemptKey]:
    """The fewest late prompts such that all others are in time. ``prompts`` are ordered by deadline. If a deadline
    would be missed, the longest prompt so far is late (Moore, 1968, by Hodgson's rule, which is exact for one machine).
    A prompt that may not be late but misses its deadline in any case makes no other late.

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
    """Time at which the instances together have done ``work_s`` of work."""
    sum_at = 0.0
    for number, at in enumerate(free_at, 1):
        sum_at += at
        computed_at = (work_s + sum_at) / number
        if number < len(free_at) and computed_at <= free_at[number]:
            break
    return computed_at


def late_rank(admission: Admission, prompt_s: float) -> float:
    """Rank of a late request, served lowest first: a short prompt goes before a long prompt unless the long prompt's
    deadline is earlier by more than ``_PROMPT_PRICE`` times the difference in prompt seconds. Ranks are fixed, so each
    request becomes the first of the late requests eventually.
    """
    return admission.deadline + _PROMPT_PRICE * prompt_s
