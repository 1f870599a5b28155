"""The launcher: what starts and stops the workers of one pool, wherever they run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class Launcher(Protocol):
    """Starts and stops workers, one slot each. Exactly one driver calls it."""

    def members(self) -> Collection[str]:
        """Ids of the workers that it runs, starting ones included, retiring ones not."""

    def waiting(self) -> Collection[str]:
        """Members that have not begun to run, which nothing loses by retiring."""

    def scale(self, num_slots: int) -> None:
        """Starts workers until there are ``num_slots``, as far as it can; stops none."""

    def retire(self, worker_id: str) -> None:
        """Begins to stop a member; other workers may start meanwhile."""
