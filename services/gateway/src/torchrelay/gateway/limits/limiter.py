"""Limits that gateways share through Redis, of keys and of tenants: requests and tokens per minute, requests at once,
and budgets.

A key or tenant without limits costs no round trip, one with limits costs one. Redis holds only state that can be
rebuilt: buckets, the reservations of running requests (each with a lease that its gateway renews), and the spending,
copied from SQL for at most a minute. Without an answer of Redis within ``ANSWER_LIMIT_S`` a gateway decides by its own
share of each limit, the limit divided by the number of gateways, and tells Redis later what it has admitted; so lost
hot state does not stop a paying tenant. A Redis that begins anew has full buckets. A budget may be exceeded by requests
that settled while the spending was copied from SQL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import func, select

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import TorchrelayError, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.billing.price_list import cost_nano
from torchrelay.gateway.billing.spending import spent_since
from torchrelay.gateway.core import NO_LIMITS, Limits, Principal, PublishedModel, Reservation
from torchrelay.gateway.limits.admission import (
    KEY,
    TENANT,
    UNKNOWN,
    Outcome,
    Use,
    Verdict,
    Wish,
    is_above,
    period_bounds,
)
from torchrelay.gateway.limits.local_use import LocalUse, Owed
from torchrelay.gateway.limits.lua_scripts import ADMIT, RELEASE, RENEW
from torchrelay.gateway.limits.refusals import rates_left, refusal, too_large
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import gateways

if TYPE_CHECKING:
    from torchrelay.gateway.limits.script_runner import RedisScriptRunner

log = get_logger(__name__)
LONG_ANSWER_TOKENS: Final = 1024  # that an answer without max_tokens reserves of its tokens per minute
_SPENT_TTL_S: Final = 60
_GATEWAYS_TTL_S: Final = 10.0
_RELEASE_PAUSES_S = (0.0, 1.0, 5.0, 30.0)  # before each attempt to release what nobody waits for
_CLOSE_S = 1.0  # for these attempts when the gateway stops
_RENEWALS_PER_LEASE: Final = 3
_MAX_UNDOING: Final = 1000  # beyond it, reservations are left to their leases
_MAX_TOLD: Final = 200  # requests, in one call of Redis


@dataclass(frozen=True, slots=True)
class LimitsUse:
    """The limits of a key and of its tenant, with the use of each."""

    limits: tuple[Limits, Limits]
    uses: tuple[Use, Use]
    periods_us: tuple[tuple[int, int | None], tuple[int, int | None]]


class Limiter:
    """Checks requests against the limits of their key and of their tenant."""

    def __init__(
        self, redis_url: str, database: Database, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``redis_url``: empty for a gateway that decides alone. ``lease_s``: the life of a reservation whose gateway
        does not renew it.
        """
        self._clock = clock
        self._redis_url = redis_url
        self._database = database
        self._lease_s = lease_s
        self._scripts: RedisScriptRunner | None = None
        self._local = LocalUse()
        self._num_gateways, self._counted_at_s, self._counting = 1, float("-inf"), asyncio.Lock()
        self._running: dict[str, Reservation] = {}  # to be renewed
        self._renewing: asyncio.Task[None] | None = None
        # Running requests that Redis does not know, by tenant; and those that it is told of now, with their cost and
        # tokens if they have ended meanwhile.
        self._unreported: dict[str, dict[str, Reservation]] = {}
        self._telling: dict[str, tuple[int, int] | None] = {}
        self._asking: dict[str, asyncio.Future[int]] = {}  # for the spending of a key or tenant
        self._undoing: set[asyncio.Task[None]] = set()  # work on reservations that nobody waits for

    async def close(self) -> None:
        if self._undoing:
            await asyncio.wait(self._undoing, timeout=_CLOSE_S)
        ending = [*self._undoing, *([self._renewing] if self._renewing else [])]
        for each in ending:
            each.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._scripts is not None:
            await self._scripts.close()

    async def admit(
        self,
        principal: Principal,
        model: PublishedModel,
        num_prompt_tokens: int,
        max_output_tokens: int,
        min_output_tokens: int | None = None,
        *,
        num_requests: int = 1,
    ) -> Reservation:
        """Takes a request from the rates of its key and tenant, and reserves its largest cost from their budgets.

        ``max_output_tokens`` is the sum over all choices. With ``min_output_tokens`` a multiple of these is reserved if
        no more is left of a budget, and a usual answer of the tokens per minute. ``num_requests``: 0 for a further
        prompt of a call. Raises ``RateLimited``, also while running requests reserve what this one needs,
        ``QuotaExceeded``, or ``InvalidRequest`` for a request that is larger than a minute's tokens. Nothing stays
        reserved if the call is cancelled.
        """
        if principal.limits == NO_LIMITS == principal.tenant_limits:
            return Reservation("", principal.tenant_id, principal.key_id, max_output_tokens)
        work = self._admit(principal, model, num_prompt_tokens, max_output_tokens, min_output_tokens, num_requests)
        admitting = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(admitting)
        except asyncio.CancelledError:
            self._in_background(self._undo(admitting))
            raise

    async def use_of(self, principal: Principal) -> LimitsUse:
        """Returns what the key and its tenant use of their limits. Raises ``Unavailable`` without SQL."""
        limits = principal.limits, principal.tenant_limits
        verdict, _ = await self._verdict(principal, Wish(), None)
        now = now_unix_us()
        return LimitsUse(
            limits,
            verdict.uses,
            (period_bounds(limits[KEY].budget_period, now), period_bounds(limits[TENANT].budget_period, now)),
        )

    def abandon(self, reservation: Reservation) -> None:
        """Ends the reservation of a request that never began, without waiting."""
        self._in_background(self._release_until_answered(reservation))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        undoing = asyncio.ensure_future(work)
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    async def _undo(self, admitting: asyncio.Future[Reservation]) -> None:
        """Releases what an admission without a caller reserves, once it is decided."""
        with suppress(TorchrelayError):
            await self._release_until_answered(await admitting)

    async def _release_until_answered(self, reservation: Reservation) -> None:
        for pause_s in _RELEASE_PAUSES_S:
            await asyncio.sleep(pause_s)
            if await self.release(reservation, cost_nano=0, num_tokens=0):
                return
        log.warning("reservation_left_to_its_lease", reservation_id=reservation.reservation_id)

    async def _admit(
        self,
        principal: Principal,
        model: PublishedModel,
        num_prompt_tokens: int,
        max_output_tokens: int,
        min_output_tokens: int | None,
        num_requests: int,
    ) -> Reservation:
        price, limits = model.price, (principal.limits, principal.tenant_limits)
        num_tokens = num_prompt_tokens + max_output_tokens
        if min_output_tokens is not None:
            num_tokens = num_prompt_tokens + max(min_output_tokens, min(max_output_tokens, LONG_ANSWER_TOKENS))
            most = min(each.tokens_per_minute or num_tokens for each in limits)
            num_tokens = max(num_prompt_tokens + min_output_tokens, min(num_tokens, most))
        if (place := is_above(limits, num_tokens)) is not None:
            raise too_large(principal, place, num_tokens)
        has_budget = any(each.budget_nano is not None for each in limits)
        wish = Wish(
            num_requests,
            1,
            num_tokens,
            cost_nano(price, num_prompt_tokens, 0, max_output_tokens) if has_budget else 0,
            cost_nano(price, num_prompt_tokens, 0, min_output_tokens or max_output_tokens),
            (min_output_tokens or 0) * price.output_nano,
        )
        reservation_id = new_id("rsv")
        verdict, is_reported = await self._verdict(principal, wish, reservation_id)
        if verdict.outcome is not Outcome.OK:
            # Redis may have reserved it, and answers too late.
            if not is_reported and self._redis_url and len(self._undoing) < _MAX_UNDOING:
                self.abandon(Reservation(reservation_id, principal.tenant_id, principal.key_id, max_output_tokens))
            raise refusal(principal, wish, verdict)
        if verdict.amount_nano < wish.amount_nano:
            max_output_tokens -= (wish.amount_nano - verdict.amount_nano) // price.output_nano
        reservation = Reservation(
            reservation_id,
            principal.tenant_id,
            principal.key_id,
            max_output_tokens,
            num_requests,
            num_tokens,
            verdict.amount_nano,
            rates_left(limits, verdict, num_requests, num_tokens),
        )
        self._local.take(_names(reservation), limits, reservation, self._num_gateways, self._clock())
        if not is_reported and self._redis_url:
            self._unreported.setdefault(principal.tenant_id, {})[reservation_id] = reservation
        self._running[reservation_id] = reservation
        if self._redis_url and self._renewing is None:
            self._renewing = asyncio.ensure_future(self._renew())
        return reservation

    async def _verdict(self, principal: Principal, wish: Wish, reservation_id: str | None) -> tuple[Verdict, bool]:
        """The verdict of Redis or, without its answer, of this gateway, and whether it is that of Redis.

        Redis reserves under the id if it is ``OK``.
        """
        limits = principal.limits, principal.tenant_limits
        now = now_unix_us()
        begins = [period_bounds(each.budget_period, now)[0] for each in limits]
        answer = await self._try(principal, wish, reservation_id, begins, (UNKNOWN, UNKNOWN))
        if answer[0].outcome is Outcome.SPENT:
            spent = await self._spent(principal, KEY, begins[KEY]), await self._spent(principal, TENANT, begins[TENANT])
            answer = await self._try(principal, wish, reservation_id, begins, spent)
        return answer

    async def _try(
        self,
        principal: Principal,
        wish: Wish,
        reservation_id: str | None,
        begins_us: list[int],
        spent_nano: tuple[int, int],
    ) -> tuple[Verdict, bool]:
        limits = principal.limits, principal.tenant_limits
        names = _scope_names(principal.tenant_id, principal.key_id)
        now_s = self._clock()
        for name, spent, begin_us in zip(names, spent_nano, begins_us, strict=True):
            if spent >= 0:
                self._local.note_spent(name, spent, begin_us, now_s + _SPENT_TTL_S, now_s)
        args: list[str | int | float] = [reservation_id or "", self._lease_s, principal.key_id]
        args += [wish.num_requests, wish.num_tokens, wish.amount_nano, wish.least_nano, wish.step_nano]
        owed = self._local.take_owed(names)  # so that calls at the same time tell it once
        for limit, begin_us, spent, ended in zip(limits, begins_us, spent_nano, owed, strict=True):
            of_scope = limit.requests_per_minute, limit.tokens_per_minute, limit.concurrent_requests, limit.budget_nano
            args += [UNKNOWN if each is None else each for each in of_scope]
            args += [begin_us, spent, _SPENT_TTL_S, *ended]
        unreported = self._unreported.get(principal.tenant_id, {})
        running = [*islice(unreported.values(), _MAX_TOLD)]
        for each in running:
            args += [each.reservation_id, each.key_id, each.num_requests, each.num_tokens, each.reserved_nano]
            del unreported[each.reservation_id]
            self._telling[each.reservation_id] = None
        answer = None
        try:
            answer = await self._run(ADMIT, principal.tenant_id, args)
        finally:
            for each in running:
                self._told(each, is_known=answer is not None)
            if answer is None:
                self._local.owe(names, owed)
        if answer is not None:
            return _read(answer), True
        await self._count_gateways()
        return self._local.decide(names, limits, wish, begins_us, self._num_gateways, self._clock()), False

    def _told(self, reservation: Reservation, *, is_known: bool) -> None:
        """Redis was told of a running request, which may have ended meanwhile."""
        ended = self._telling.pop(reservation.reservation_id)
        if ended is None and not is_known:
            self._unreported.setdefault(reservation.tenant_id, {})[reservation.reservation_id] = reservation
        elif ended is not None and is_known:
            self._in_background(self._release_late(reservation, *ended))
        elif ended is not None:
            self._local.owe(_names(reservation), [Owed(reservation.num_requests, ended[1])] * 2)

    async def _release_late(self, reservation: Reservation, cost_nano: int, num_tokens: int) -> None:
        await self._run(RELEASE, reservation.tenant_id, [reservation.reservation_id, cost_nano, num_tokens])

    async def _count_gateways(self) -> None:
        """Counts the gateways that share the limits, once for all that wait. Without SQL the last number holds."""
        async with self._counting:
            if self._clock() - self._counted_at_s < _GATEWAYS_TTL_S:
                return
            with suppress(Unavailable):
                async with self._database.read() as connection:
                    number = (await connection.execute(select(func.count()).select_from(gateways))).scalar_one()
                self._num_gateways = max(1, number)
            self._counted_at_s = self._clock()

    async def _renew(self) -> None:
        """Renews the leases of running requests."""
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS_PER_LEASE)
            members: dict[str, list[str | int | float]] = {}
            for each in self._running.values():
                members.setdefault(each.tenant_id, [self._lease_s]).append(each.reservation_id)
            for tenant_id, args in members.items():
                for unknown in await self._run(RENEW, tenant_id, args) or ():
                    self._tell_again(unknown.decode())

    def _tell_again(self, reservation_id: str) -> None:
        """Redis has lost a running request: its lease was over, or Redis began anew."""
        running = self._running.get(reservation_id)
        if running is not None and reservation_id not in self._telling:
            again = replace(running, num_requests=0)
            self._unreported.setdefault(running.tenant_id, {})[reservation_id] = again

    async def release(self, reservation: Reservation, cost_nano: int, num_tokens: int) -> bool:
        """Ends the reservation of a request that used ``num_tokens`` and is billed ``cost_nano``. Idempotent.

        False if Redis did not answer: to be called again, or the reservation stays until its lease ends.
        """
        if not reservation.reservation_id:
            return True
        self._running.pop(reservation.reservation_id, None)
        self._local.give_back(_names(reservation), reservation, cost_nano, num_tokens)
        if not self._redis_url:
            return True
        if reservation.reservation_id in self._telling:
            self._telling[reservation.reservation_id] = cost_nano, num_tokens
            return True
        owed = [Owed(reservation.num_requests, num_tokens)] * 2
        is_unreported = (
            self._unreported.get(reservation.tenant_id, {}).pop(reservation.reservation_id, None) is not None
        )
        if is_unreported:
            self._local.owe(_names(reservation), owed)
        args: list[str | int | float] = [reservation.reservation_id, cost_nano, num_tokens]
        answer = await self._run(RELEASE, reservation.tenant_id, args)
        if is_unreported and answer is not None and answer[1] == b"1":  # Redis had admitted it, and answered too late
            self._local.owe(_names(reservation), [Owed(-each.num_requests, -each.num_tokens) for each in owed])
        return answer is not None

    async def _run(self, script: str, tenant_id: str, args: list[str | int | float]) -> list[bytes] | None:
        """The script's answer; None without a Redis, or if it does not answer."""
        if not self._redis_url:
            return None
        if self._scripts is None:
            # Imported with the first limit: redis-py takes 6 MB, which installations without limits never need.
            from torchrelay.gateway.limits.script_runner import RedisScriptRunner

            self._scripts = RedisScriptRunner(self._redis_url)
        # Both keys share a hash tag, which puts them on one node of a Redis cluster.
        keys = [f"relay:{{{tenant_id}}}:use", f"relay:{{{tenant_id}}}:running"]
        return await self._scripts.run(script, keys, args)

    async def _spent(self, principal: Principal, place: int, begin_us: int) -> int:
        """Returns the spending since the begin of the budget's period; ``UNKNOWN`` without a budget.

        Requests that ask at once share an answer.
        """
        if (principal.limits, principal.tenant_limits)[place].budget_nano is None:
            return UNKNOWN
        key_id = principal.key_id if place == KEY else None
        scope = _scope_names(principal.tenant_id, principal.key_id)[place]
        asking = self._asking.get(scope)
        if asking is None:
            asking = asyncio.ensure_future(spent_since(self._database, principal.tenant_id, key_id, begin_us))
            self._asking[scope] = self._database.own(asking)
            asking.add_done_callback(lambda _: self._asking.pop(scope, None))
        return await asyncio.shield(asking)


def _scope_names(tenant_id: str, key_id: str) -> tuple[str, str]:
    return f"{tenant_id}/{key_id}", tenant_id


def _names(reservation: Reservation) -> tuple[str, str]:
    return _scope_names(reservation.tenant_id, reservation.key_id)


def _read(answer: list[bytes]) -> Verdict:
    def use(first: int) -> Use:
        requests, tokens, *integers = answer[first : first + 5]
        return Use(float(requests), float(tokens), *map(int, integers))

    return Verdict(Outcome(answer[0].decode()), int(answer[1]), float(answer[2]), int(answer[3]), (use(4), use(9)))
