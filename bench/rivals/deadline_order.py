"""The order in which rivals' requests wait: earliest deadline first, also among late requests.

Their papers use first come, first served, which attains little in an overload, so this order favours them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchrelay.scheduler.policy.queue.late_requests import TimedPrompt
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import Admission, AttemptKey


def by_deadline(strategies: Strategies) -> Strategies:
    """The strategies with this order."""
    return replace(strategies, choose_late=_none, late_rank=_by_deadline)


def _none(prompts: Iterable[TimedPrompt], free_at: Sequence[float], share: float = 1.0) -> Sequence[AttemptKey]:
    return ()


def _by_deadline(admission: Admission, prompt_s: float) -> float:
    return admission.deadline
