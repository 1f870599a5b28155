"""The launcher: what starts and stops the workers of one pool, wherever they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

from torchrelay.common.quantities import format_count


class Launcher(Protocol):
    """Starts and stops workers, one slot each. Exactly one driver calls it."""

    def members(self) -> Collection[str]:
        """Ids of the workers that it runs, starting ones included, retiring ones not."""

    def waiting(self) -> Mapping[str, str]:
        """Members that have not begun to run, which nothing loses by retiring, and why, as far as it is known."""

    def scale(self, num_slots: int) -> None:
        """Starts workers until there are ``num_slots``, as far as it can; stops none."""

    def retire(self, worker_id: str) -> None:
        """Begins to stop a member; other workers may start meanwhile."""


def waits_text(waiting: Mapping[str, str]) -> str:
    """Why workers wait: each reason once, with their number."""
    reasons = Counter(reason for reason in waiting.values() if reason)
    return "; ".join(
        f"{format_count(number, 'worker')} waiting: {reason}" for reason, number in sorted(reasons.items())
    )
