"""The order in which requests of rivals wait: the earliest deadline first, and of those that are late too.

Their papers have first come, first served, with which they attain little in an overload: this is kind to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchrelay.scheduler.policy.admission.late_requests import TimedPrompt
from torchrelay.scheduler.policy.core import Admission, AttemptKey
from torchrelay.scheduler.policy.strategies import Strategies


def by_deadline(strategies: Strategies) -> Strategies:
    """With this order."""
    return replace(strategies, choose_late=_none, late_rank=_by_deadline)


def _none(prompts: Iterable[TimedPrompt], free_at: Sequence[float], share: float = 1.0) -> Sequence[AttemptKey]:
    return ()


def _by_deadline(admission: Admission, prompt_s: float) -> float:
    return admission.deadline
