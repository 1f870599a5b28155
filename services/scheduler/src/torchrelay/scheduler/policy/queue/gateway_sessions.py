"""The admissions of each gateway, and their fate when its stream breaks.

A gateway that reconnects sends every open admission again. Admissions that it has not sent again within a grace time
are over: withdrawn while it was away, or lost with its process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.scheduler.policy.types import AttemptKey


@dataclass(slots=True)
class _Session:
    is_connected: bool = True
    confirmed: dict[AttemptKey, None] = field(default_factory=dict)  # dicts, because sets have no order
    unconfirmed: dict[AttemptKey, None] = field(default_factory=dict)
    deadline: float = 0.0  # for the unconfirmed admissions


class GatewaySessions:
    """Admissions by gateway, confirmed on its current stream or not yet."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._sessions: dict[str, _Session] = {}
        self._session_of: dict[AttemptKey, _Session] = {}

    def changed(self, gateway_id: str, is_connected: bool, now: float) -> tuple[AttemptKey, ...]:
        """Starts or ends a stream. Returns the admissions that are unconfirmed from now on, whose placement cannot be
        sent.
        """
        session = self._sessions.setdefault(gateway_id, _Session())
        session.is_connected, session.deadline = is_connected, now + self._grace_s
        keys = tuple(session.confirmed)
        session.unconfirmed |= session.confirmed
        session.confirmed.clear()
        return keys

    def confirm(self, gateway_id: str, key: AttemptKey) -> None:
        """Records that the gateway sent this admission, for the first time or again."""
        self.forget(key)
        self._session_of[key] = session = self._sessions.setdefault(gateway_id, _Session())
        session.confirmed[key] = None

    def forget(self, key: AttemptKey) -> None:
        if (session := self._session_of.pop(key, None)) is not None:
            session.confirmed.pop(key, None)
            session.unconfirmed.pop(key, None)

    def overdue(self, now: float) -> tuple[AttemptKey, ...]:
        """Admissions whose grace time is over. Disconnected gateways without admissions are removed."""
        late = {gateway_id: session for gateway_id, session in self._sessions.items() if session.deadline <= now}
        for gateway_id, session in late.items():
            if not session.is_connected and not session.confirmed and not session.unconfirmed:
                del self._sessions[gateway_id]
        return tuple(key for session in late.values() for key in session.unconfirmed)
