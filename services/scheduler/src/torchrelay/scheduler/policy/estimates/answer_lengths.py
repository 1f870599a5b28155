"""Length of a model's answers, which are seldom as long as their requests allow."""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.types import MAX_VERSIONS

_MIN_ANSWERS = 8  # fewer say little
_WINDOW = 64  # length of the moving average, in answers


@dataclass(slots=True)
class _Mean:
    number: int = 0
    num_tokens: float = 0.0


class AnswerLengths:
    """Recent mean length of answers, by version."""

    def __init__(self) -> None:
        self._means: Recent[str, _Mean] = Recent(MAX_VERSIONS)

    def observe(self, version_id: str, num_tokens: float) -> None:
        """Learns from an answer that ended after ``num_tokens`` tokens per choice."""
        self._means[version_id] = mean = self._means.get(version_id) or _Mean()
        mean.number += 1
        mean.num_tokens += (num_tokens - mean.num_tokens) / min(mean.number, _WINDOW)

    def expected(self, version_id: str, max_tokens: int) -> int:
        """Expected number of tokens of an answer that may have ``max_tokens``."""
        mean = self.mean(version_id)
        return max_tokens if mean is None else min(round(mean), max_tokens)

    def mean(self, version_id: str) -> float | None:
        """Mean number of tokens per choice; None if too few answers have ended."""
        mean = self._means.get(version_id)
        return mean.num_tokens if mean is not None and mean.number >= _MIN_ANSWERS else None
