"""The token path's interfaces to the rest of the gateway, as protocols.

Implemented by ``auth.api_keys.ApiKeys``, ``catalog.catalog.Catalog``, ``billing.ledger.Ledger`` and
``limits.limiter.Limiter``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchrelay.gateway.core import ChoiceUsage, LineResult, OpenedRequest, Principal, PublishedModel, Reservation


class Authenticator(Protocol):
    async def authenticate(self, authorization: str | None) -> Principal:
        """The principal of ``Bearer tr-...``. Raises ``Unauthenticated``."""


class ModelCatalog(Protocol):
    async def resolve(self, principal: Principal, name: str) -> PublishedModel:
        """The model ``tenant/model``, or ``model`` of the principal's own tenant. Raises ``ModelNotFound``."""

    async def models(self, principal: Principal) -> list[PublishedModel]:
        """All models the principal may call, by name."""


class RequestLedger(Protocol):
    async def open(self, opened: OpenedRequest) -> None:
        """Returns once the row is committed. Raises ``Unavailable``."""

    async def settle(self, request_id: str, usages: Sequence[ChoiceUsage]) -> int:
        """Bills the request; returns its cost in nano-dollars once committed. Idempotent."""

    async def settle_line(self, result: LineResult, parts: Sequence[tuple[str, Sequence[ChoiceUsage]]]) -> int:
        """Bills the requests of a batch's line if its result is kept. Raises ``Conflict`` otherwise."""


class RequestLimiter(Protocol):
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
        no more is left of a budget. ``num_requests``: 0 for a further prompt of a call. Raises ``RateLimited``,
        ``QuotaExceeded`` or ``InvalidRequest``.
        """

    def abandon(self, reservation: Reservation) -> None:
        """Ends the reservation of a request that never began, without waiting."""

    async def release(self, reservation: Reservation, cost_nano: int, num_tokens: int) -> bool:
        """Ends the reservation of a request that used ``num_tokens`` and is billed ``cost_nano``. Idempotent.

        False if Redis did not answer: to be called again, or the reservation stays until its lease ends.
        """
