"""How long a launcher has been starting slots. Nothing says whether they will ever come."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_LIMIT_S = 600.0  # a machine may be bought, and an image read


@dataclass(slots=True)
class SlotStarts:
    """The start under way of a slot. It is overdue after the longest start seen, and at least ten minutes."""

    limit_s: float = _MIN_LIMIT_S
    _num_slots: int = 0
    _since: float | None = None

    def observe(self, num_slots: int, is_starting: bool, now: float) -> None:
        if self._since is not None and num_slots > self._num_slots:
            self.limit_s, self._since = max(self.limit_s, now - self._since), None
        self._num_slots = num_slots
        self._since = (now if self._since is None else self._since) if is_starting else None

    def is_overdue(self, now: float) -> bool:
        return self._since is not None and now - self._since > self.limit_s
