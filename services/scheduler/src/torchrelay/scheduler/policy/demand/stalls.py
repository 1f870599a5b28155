"""Scaling stall: the time in which requests of a model wait for a load, since none of its instances is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torchrelay.scheduler.policy.types import Model


class Stalls:
    """Seconds by model. A time in which several requests wait counts once."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running: dict[str, tuple[str, float]] = {}  # by version: model, and the time counted so far

    def begin(self, model: Model, now: float) -> None:
        """Begins a stall, unless one is running."""
        self._running.setdefault(model.version_id, (model.name, now))

    def end(self, version_id: str, now: float) -> None:
        """Ends the stall of a version, if there is one."""
        if (stall := self._running.pop(version_id, None)) is not None:
            name, since = stall
            self.seconds[name] += now - since

    def review(self, waits_for_load: Callable[[str], bool], now: float) -> None:
        """Counts the running stalls until now, and ends those of versions for which nothing waits any more."""
        for version_id, (name, _) in list(self._running.items()):
            self.end(version_id, now)
            if waits_for_load(version_id):
                self._running[version_id] = name, now
