"""The admissions of each gateway, and their fate when its stream breaks.

A gateway that reconnects sends every open admission again. Admissions that it has not sent again within a grace time
are over: withdrawn while it was away, or lost with its process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.scheduler.policy.types import AttemptKey


@dataclass
class _Session:
    connected: bool = False
    confirmed: dict[AttemptKey, None] = field(default_factory=dict)  # dicts, because sets have no order
    unconfirmed: dict[AttemptKey, None] = field(default_factory=dict)
    deadline: float = 0.0  # for the unconfirmed admissions


class GatewaySessions:
    """Admissions by gateway, confirmed on its current stream or not yet."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._of: dict[str, _Session] = {}
        self._owner: dict[AttemptKey, str] = {}

    def __len__(self) -> int:
        return len(self._of)

    def connected(self, gateway_id: str, now: float) -> tuple[AttemptKey, ...]:
        """Starts a stream. Returns the admissions that are unconfirmed from now on, whose placement cannot be sent."""
        session = self._of.setdefault(gateway_id, _Session())
        session.connected = True
        return self._unconfirm(session, now)

    def disconnected(self, gateway_id: str, now: float) -> tuple[AttemptKey, ...]:
        """Ends a stream. Returns the admissions that are unconfirmed from now on."""
        session = self._of.get(gateway_id)
        if session is None:
            return ()
        session.connected = False
        return self._unconfirm(session, now)

    def _unconfirm(self, session: _Session, now: float) -> tuple[AttemptKey, ...]:
        keys = tuple(session.confirmed)
        session.unconfirmed |= session.confirmed
        session.confirmed.clear()
        session.deadline = now + self._grace_s
        return keys

    def confirm(self, gateway_id: str, key: AttemptKey) -> None:
        """Records that the gateway sent this admission, for the first time or again."""
        self.forget(key)
        self._owner[key] = gateway_id
        session = self._of.get(gateway_id)
        if session is None:
            session = self._of[gateway_id] = _Session(connected=True)
        session.confirmed[key] = None

    def forget(self, key: AttemptKey) -> None:
        gateway_id = self._owner.pop(key, None)
        if gateway_id is not None:
            session = self._of[gateway_id]
            session.confirmed.pop(key, None)
            session.unconfirmed.pop(key, None)

    def overdue(self, now: float) -> tuple[AttemptKey, ...]:
        """Admissions whose grace time is over. Gateways without admissions are removed."""
        for gateway_id in [key for key, session in self._of.items() if self._is_over(session, now)]:
            del self._of[gateway_id]
        return tuple(key for session in self._of.values() if session.deadline <= now for key in session.unconfirmed)

    @staticmethod
    def _is_over(session: _Session, now: float) -> bool:
        return not session.connected and not session.confirmed and not session.unconfirmed and session.deadline <= now
