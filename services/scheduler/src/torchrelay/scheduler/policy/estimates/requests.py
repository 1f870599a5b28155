"""Estimates of a version's requests: the length of their answers, how much of their prompts is cached where they are
placed, and whether several tenants call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MIN_ANSWERS = 8  # fewer say little
_WINDOW = 64  # length of the moving averages, in answers or prompts
_RECENT_S = 2.0


@dataclass(slots=True)
class AnswerLength:
    """Recent mean length of answers, which are seldom as long as their requests allow."""

    _number: int = 0
    _num_tokens: float = 0.0

    def observe(self, num_tokens: float) -> None:
        """Learns from an answer that ended after ``num_tokens`` tokens per choice."""
        self._number += 1
        self._num_tokens += (num_tokens - self._num_tokens) / min(self._number, _WINDOW)

    @property
    def mean(self) -> float | None:
        """Mean number of tokens per choice; None if too few answers have ended."""
        return self._num_tokens if self._number >= _MIN_ANSWERS else None

    def expected(self, max_tokens: int) -> int:
        """Expected number of tokens of an answer that may have ``max_tokens``."""
        return max_tokens if self.mean is None else min(round(self.mean), max_tokens)


@dataclass(slots=True)
class CachedShare:
    """Recent mean numbers of a prompt's tokens, all and cached ones, while the version has instances."""

    _number: int = 0
    _num_tokens: float = 0.0
    _num_cached: float = 0.0

    def observe(self, num_tokens: int, num_cached: int) -> None:
        """Learns from a prompt of which the instance that it was dispatched to has ``num_cached`` tokens."""
        self._number += 1
        weight = 1 / min(self._number, _WINDOW)
        self._num_tokens += (num_tokens - self._num_tokens) * weight
        self._num_cached += (num_cached - self._num_cached) * weight

    @property
    def uncached(self) -> float:
        """Share of prompt tokens that must be computed where prompts are dispatched; 1 before the first prompt."""
        return 1.0 - self._num_cached / self._num_tokens if self._num_tokens else 1.0


@dataclass(slots=True)
class Callers:
    """The tenant and time of the last request, and the time of another tenant's last request: identical uploads share
    instances.
    """

    _tenant: str = ""
    _at: float = -math.inf
    _other_at: float = -math.inf

    def note(self, tenant: str, now: float) -> None:
        """Records the arrival of a request."""
        if tenant != self._tenant:
            self._tenant, self._other_at = tenant, self._at
        self._at = now

    def are_several(self, now: float) -> bool:
        """Whether two tenants have called within two seconds."""
        return now - self._other_at <= _RECENT_S
