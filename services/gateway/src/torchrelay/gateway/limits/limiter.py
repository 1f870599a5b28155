"""Limits that gateways share through Redis: a key's requests per minute, and a tenant's budget.

A key or tenant without limits costs no round trip, one with limits costs one. Redis holds only state that can be
rebuilt: token buckets, the reservations of running requests (each with a lease, in case their gateway dies), and the
tenant's spending, copied from SQL for at most a minute. Without Redis requests are *allowed*, which is logged once:
lost hot state must not stop a paying tenant. A Redis that hangs costs one request half a second, once a second. A
budget may therefore be exceeded by what was admitted meanwhile, and by requests that settled while the spending was
copied from SQL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from torchrelay.common.errors import QuotaExceeded, RateLimited, TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.billing.money import dollars
from torchrelay.gateway.billing.price_list import cost_nano
from torchrelay.gateway.core import Principal, PublishedModel, RequestRate, Reservation
from torchrelay.gateway.limits.lua_scripts import ADMIT, RELEASE, RENEW
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import balances

if TYPE_CHECKING:
    from torchrelay.gateway.limits.script_runner import RedisScriptRunner

log = get_logger(__name__)
_SPENT_TTL_S = 60
_RELEASE_PAUSES_S = (0.0, 1.0, 5.0, 30.0)  # before each attempt to release what nobody waits for
_CLOSE_S = 1.0  # for these attempts when the gateway stops
_RESERVED_RETRY_S = 1.0  # running requests usually cost a small part of their reservation


class RequestRateExceeded(RateLimited):
    """A key has used its requests per minute."""

    def __init__(self, rate: RequestRate, retry_after_s: float) -> None:
        message = f"rate limit exceeded: this key allows {rate.per_minute} requests per minute"
        super().__init__(message, retry_after_s=retry_after_s)
        self.rate = rate


class Limiter:
    """Checks requests against their key's rate and their tenant's budget."""

    def __init__(
        self, redis_url: str, database: Database, lease_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """``redis_url``: empty for no limits. ``lease_s``: the longest life of a reservation.

        ``clock`` is the wall clock, since gateways share buckets and leases.
        """
        self._clock = clock
        self._redis_url = redis_url
        self._database = database
        self._lease_s = lease_s
        self._scripts: RedisScriptRunner | None = None
        self._undoing: set[asyncio.Task[None]] = set()  # work on reservations that nobody waits for

    async def close(self) -> None:
        if self._undoing:
            await asyncio.wait(self._undoing, timeout=_CLOSE_S)
        undoing = [*self._undoing]
        for each in undoing:
            each.cancel()
        await asyncio.gather(*undoing, return_exceptions=True)
        if self._scripts is not None:
            await self._scripts.close()

    async def admit(
        self,
        principal: Principal,
        model: PublishedModel,
        num_prompt_tokens: int,
        max_output_tokens: int,
        min_output_tokens: int | None = None,
    ) -> Reservation:
        """Takes one request from the key's bucket and reserves the largest possible cost from the tenant's budget.

        ``max_output_tokens`` is the sum over all choices. With ``min_output_tokens`` a multiple of these is reserved if
        no more is left of the budget. Raises ``RateLimited``, also while running requests reserve what this one needs,
        or ``QuotaExceeded``. Nothing stays reserved if the call is cancelled.
        """
        if principal.requests_per_minute is None and principal.budget_nano is None:
            return Reservation("", principal.tenant_id, 0, max_output_tokens)
        work = self._admit(principal, model, num_prompt_tokens, max_output_tokens, min_output_tokens)
        admitting = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(admitting)
        except asyncio.CancelledError:
            self._in_background(self._undo(admitting))
            raise

    def abandon(self, reservation: Reservation) -> None:
        """Ends the reservation of a request that never began, without waiting."""
        self._in_background(self._release_until_answered(reservation))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        undoing = asyncio.ensure_future(work)
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    async def _undo(self, admitting: asyncio.Future[Reservation]) -> None:
        """Releases what an admission without a caller reserves, once Redis has answered it."""
        with suppress(TorchrelayError):
            await self._release_until_answered(await admitting)

    async def _release_until_answered(self, reservation: Reservation) -> None:
        for pause_s in _RELEASE_PAUSES_S:
            await asyncio.sleep(pause_s)
            if await self.release(reservation, cost_nano=0):
                return
        log.warning("reservation_left_to_its_lease", reservation_id=reservation.reservation_id)

    async def _admit(
        self,
        principal: Principal,
        model: PublishedModel,
        num_prompt_tokens: int,
        max_output_tokens: int,
        min_output_tokens: int | None,
    ) -> Reservation:
        price, has_budget = model.price, principal.budget_nano is not None
        least = cost_nano(price, num_prompt_tokens, 0, min_output_tokens or max_output_tokens)
        step = (min_output_tokens or 0) * price.output_nano
        reserved = cost_nano(price, num_prompt_tokens, 0, max_output_tokens) if has_budget else 0
        reservation = Reservation(new_id("rsv"), principal.tenant_id, reserved, max_output_tokens)
        answer = await self._try_admit(principal, reservation, least, step, spent_nano=-1)
        if answer[0] == b"spent?":
            spent_nano = await self._spent(principal.tenant_id)
            answer = await self._try_admit(principal, reservation, least, step, spent_nano)
        if answer[0] == b"rate":
            assert principal.requests_per_minute is not None
            rate = RequestRate(principal.requests_per_minute, float(answer[2]))
            raise RequestRateExceeded(rate, retry_after_s=float(answer[1]))
        if answer[0] == b"budget":
            spent_nano, reserved_nano = map(int, answer[1:])
            if spent_nano + least <= (principal.budget_nano or 0):
                raise _budget_is_reserved(principal, reserved_nano)
            if min_output_tokens is None:
                wish = f"this one may cost {dollars(least)}; lower max_tokens"
            else:
                wish = f"this one costs at least {dollars(least)}; shorten the prompt"
            raise _over_budget(principal, wish, spent_nano, reserved_nano)
        if len(answer) > 2 and answer[2] and principal.requests_per_minute is not None:
            reservation = replace(reservation, rate=RequestRate(principal.requests_per_minute, float(answer[2])))
        if has_budget and len(answer) > 1 and int(answer[1]) < reserved:
            num_fewer_tokens = (reserved - int(answer[1])) // price.output_nano
            return replace(
                reservation, reserved_nano=int(answer[1]), max_output_tokens=max_output_tokens - num_fewer_tokens
            )
        return reservation

    def renew(self, reservation: Reservation) -> None:
        """Begins the reservation's lease anew, without waiting: its request goes on."""
        if reservation.reserved_nano > 0:
            self._in_background(self._renew(reservation))

    async def _renew(self, reservation: Reservation) -> None:
        keys = _budget_keys(reservation.tenant_id)[2:]
        await self._run(RENEW, keys, [reservation.reservation_id, self._clock() + self._lease_s])

    async def release(self, reservation: Reservation, cost_nano: int) -> bool:
        """Ends the reservation; ``cost_nano`` is the billed cost. Idempotent.

        False if Redis did not answer: to be called again, or the reservation stays until its lease ends.
        """
        if reservation.reserved_nano <= 0:
            return True
        keys = _budget_keys(reservation.tenant_id)
        return await self._run(RELEASE, keys, [reservation.reservation_id, cost_nano]) is not None

    async def _try_admit(
        self, principal: Principal, reservation: Reservation, least_nano: int, step_nano: int, spent_nano: int
    ) -> list[bytes]:
        keys = [f"relay:{{{principal.tenant_id}}}:rate:{principal.key_id}", *_budget_keys(principal.tenant_id)]
        args: list[str | int | float] = [
            self._clock(),
            principal.requests_per_minute or 0,
            -1 if principal.budget_nano is None else principal.budget_nano,
            reservation.reservation_id,
            reservation.reserved_nano,
            self._lease_s,
            spent_nano,
            _SPENT_TTL_S,
            least_nano,
            step_nano,
        ]
        return await self._run(ADMIT, keys, args) or [b"ok"]

    async def _run(self, script: str, keys: list[str], args: list[str | int | float]) -> list[bytes] | None:
        """The script's answer; ``ok`` without a Redis, None if it does not answer."""
        if not self._redis_url:
            return [b"ok"]
        if self._scripts is None:
            # Imported with the first limit: redis-py takes 6 MB, which installations without limits never need.
            from torchrelay.gateway.limits.script_runner import RedisScriptRunner

            self._scripts = RedisScriptRunner(self._redis_url)
        return await self._scripts.run(script, keys, args)

    async def _spent(self, tenant_id: str) -> int:
        query = select(balances.c.spent_nano).where(balances.c.tenant_id == tenant_id)
        async with self._database.read() as connection:
            spent_nano: int = (await connection.execute(query)).scalar_one()
        return spent_nano


def _budget_is_reserved(principal: Principal, reserved_nano: int) -> RateLimited:
    tenant, budget = principal.tenant, dollars(principal.budget_nano or 0)
    return RateLimited(
        f"running requests reserve {dollars(reserved_nano)} of the budget of {budget} of tenant {tenant}; try again "
        "once they have ended, or lower max_tokens",
        retry_after_s=_RESERVED_RETRY_S,
    )


def _over_budget(principal: Principal, wish: str, spent_nano: int, reserved_nano: int) -> QuotaExceeded:
    tenant, budget = principal.tenant, dollars(principal.budget_nano or 0)
    return QuotaExceeded(
        f"budget of {budget} of tenant {tenant} exceeded: {dollars(spent_nano)} spent, {dollars(reserved_nano)} "
        f"reserved by running requests, and {wish}, or ask the admin to raise the budget: "
        f"torchrelay tenant set {tenant} --budget DOLLARS"
    )


def _budget_keys(tenant_id: str) -> list[str]:
    """All keys of a tenant share a hash tag, which puts them on one node of a Redis cluster."""
    return [f"relay:{{{tenant_id}}}:{part}" for part in ("spent", "reserved", "amounts", "leases")]
