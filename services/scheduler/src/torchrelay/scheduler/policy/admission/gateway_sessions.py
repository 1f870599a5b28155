"""Which admissions belong to which gateway, and what becomes of them when a gateway's stream breaks.

A gateway that comes back says hello and sends every open admission again. What it has not sent again within a grace
time is over: withdrawn while it was away, or its process ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.scheduler.policy.core import AttemptKey


@dataclass
class _Session:
    present: bool = False
    confirmed: dict[AttemptKey, None] = field(default_factory=dict)  # in order, which sets lack
    unconfirmed: dict[AttemptKey, None] = field(default_factory=dict)
    deadline: float = 0.0  # of the unconfirmed ones


class GatewaySessions:
    """Admissions by gateway; each is confirmed by the gateway's present stream, or waits to be."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._of: dict[str, _Session] = {}
        self._owner: dict[AttemptKey, str] = {}

    def __len__(self) -> int:
        return len(self._of)

    def connected(self, gateway_id: str, now: float) -> None:
        record = self._of.setdefault(gateway_id, _Session())
        record.present = True
        self._doubt(record, now)

    def disconnected(self, gateway_id: str, now: float) -> None:
        record = self._of.get(gateway_id)
        if record is not None:
            record.present = False
            self._doubt(record, now)

    def _doubt(self, record: _Session, now: float) -> None:
        record.unconfirmed |= record.confirmed
        record.confirmed.clear()
        record.deadline = now + self._grace_s

    def confirm(self, gateway_id: str, key: AttemptKey) -> None:
        """The gateway has sent this admission, for the first time or again."""
        self.forget(key)
        self._owner[key] = gateway_id
        self._of.setdefault(gateway_id, _Session(present=True)).confirmed[key] = None

    def forget(self, key: AttemptKey) -> None:
        gateway_id = self._owner.pop(key, None)
        if gateway_id is not None:
            record = self._of[gateway_id]
            record.confirmed.pop(key, None)
            record.unconfirmed.pop(key, None)

    def is_confirmed(self, key: AttemptKey) -> bool:
        """Whether a present gateway asks for it: only then is it placed."""
        gateway_id = self._owner.get(key)
        return gateway_id is not None and key in self._of[gateway_id].confirmed

    def overdue(self, now: float) -> tuple[AttemptKey, ...]:
        """Admissions whose grace is over. Gateways with nothing left are forgotten."""
        for gateway_id in [key for key, record in self._of.items() if self._is_over(record, now)]:
            del self._of[gateway_id]
        return tuple(key for record in self._of.values() if record.deadline <= now for key in record.unconfirmed)

    @staticmethod
    def _is_over(record: _Session, now: float) -> bool:
        return not record.present and not record.confirmed and not record.unconfirmed and record.deadline <= now
