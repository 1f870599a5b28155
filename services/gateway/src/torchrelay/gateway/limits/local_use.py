"""A gateway's own admissions, by which it decides while Redis does not answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from torchrelay.common.recent import Recent
from torchrelay.gateway.core import Limits, Reservation
from torchrelay.gateway.limits.admission import UNKNOWN, Use, Verdict, Wish, decide, refilled, share_of

_MAX_SCOPES: Final = 10_000  # keys and tenants


class Owed(NamedTuple):
    """Requests that a gateway has admitted without Redis, that have ended, and their tokens: not yet told to Redis."""

    num_requests: int = 0
    num_tokens: int = 0


NOTHING: Final = Owed()


@dataclass(slots=True)
class _State:
    """The use of a key or a tenant through this gateway."""

    use: Use
    at_s: float
    spent_until_s: float = 0.0
    period_begin_us: int = 0
    reserved_ids: set[str] = field(default_factory=set)
    owed: Owed = NOTHING


class LocalUse:
    """Buckets and reservations of the keys and tenants that this gateway has admitted last.

    They follow each admission, also those that Redis decides, so that a gateway that loses Redis goes on with its share
    of what is left and does not begin with full buckets.
    """

    def __init__(self) -> None:
        self._states: Recent[str, _State] = Recent(_MAX_SCOPES)

    def decide(
        self,
        names: Sequence[str],
        limits: Sequence[Limits],
        wish: Wish,
        periods_us: Sequence[int],
        num_gateways: int,
        now_s: float,
    ) -> Verdict:
        """The verdict on a request by this gateway's share; changes nothing. ``names``: of the key and the tenant."""
        uses, shares = [], []
        for name, whole, period_us in zip(names, limits, periods_us, strict=True):
            state = self._states.get(name)
            is_known = state is not None and now_s < state.spent_until_s and state.period_begin_us == period_us
            spent = state.use.spent_nano if state is not None and is_known else UNKNOWN
            share = share_of(whole, num_gateways, spent)
            shares.append(share)
            uses.append(replace(_refilled(state, share, now_s), spent_nano=spent))
        return decide(wish, shares, (uses[0], uses[1]))

    def note_spent(self, name: str, spent_nano: int, period_us: int, until_s: float, now_s: float) -> None:
        """Notes the spending of a key or tenant in its period, as SQL has it."""
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _State(Use(float("inf"), float("inf")), now_s)
        state.use.spent_nano, state.period_begin_us, state.spent_until_s = spent_nano, period_us, until_s

    def take(
        self,
        names: Sequence[str],
        limits: Sequence[Limits],
        reservation: Reservation,
        num_gateways: int,
        now_s: float,
    ) -> None:
        """Notes an admitted request."""
        for name, whole in zip(names, limits, strict=True):
            share = share_of(whole, num_gateways, UNKNOWN)
            state = self._states.get(name)
            if state is None:
                state = _State(Use(float("inf"), float("inf")), now_s)
            use = _refilled(state, share, now_s)
            use.requests_left = max(0.0, use.requests_left - reservation.num_requests)
            use.tokens_left = max(-(share.tokens_per_minute or 0.0), use.tokens_left - reservation.num_tokens)
            use.num_running += 1
            use.reserved_nano += reservation.reserved_nano
            state.use, state.at_s = use, now_s
            state.reserved_ids.add(reservation.reservation_id)
            self._states[name] = state  # the newest

    def take_owed(self, names: Sequence[str]) -> list[Owed]:
        """Takes the debts to Redis of each name; nothing is owed afterwards."""
        taken = []
        for name in names:
            state = self._states.get(name)
            taken.append(NOTHING if state is None else state.owed)
            if state is not None:
                state.owed = NOTHING
        return taken

    def owe(self, names: Sequence[str], more: Sequence[Owed]) -> None:
        """Adds to what Redis must be told; negative: it knows that already."""
        for name, (num_requests, num_tokens) in zip(names, more, strict=True):
            if (state := self._states.get(name)) is not None:
                state.owed = Owed(state.owed.num_requests + num_requests, state.owed.num_tokens + num_tokens)

    def give_back(self, names: Sequence[str], reservation: Reservation, cost_nano: int, num_tokens: int) -> None:
        """Notes the end of a request that used ``num_tokens``. Idempotent."""
        for name in names:
            state = self._states.get(name)
            if state is None or reservation.reservation_id not in state.reserved_ids:
                continue
            state.reserved_ids.remove(reservation.reservation_id)
            use = state.use
            use.tokens_left += reservation.num_tokens - num_tokens
            use.num_running -= 1
            use.reserved_nano -= reservation.reserved_nano
            if use.spent_nano >= 0:
                use.spent_nano += cost_nano


def _refilled(state: _State | None, share: Limits, now_s: float) -> Use:
    """The use now; full buckets for a key or tenant that has admitted nothing here."""
    use = replace(state.use) if state is not None else Use(float("inf"), float("inf"))
    elapsed_s = 0.0 if state is None else now_s - state.at_s
    rpm, tpm = share.requests_per_minute, share.tokens_per_minute
    use.requests_left = 0.0 if rpm is None else refilled(use.requests_left, rpm, elapsed_s)
    use.tokens_left = 0.0 if tpm is None else refilled(use.tokens_left, tpm, elapsed_s)
    return use
