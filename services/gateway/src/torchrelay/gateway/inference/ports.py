"""What the token path asks of the rest of the gateway: keys, catalog, ledger and limits, as protocols.

The classes of the same names in ``keys``, ``catalog``, ``ledger`` and ``limits`` fit them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchrelay.gateway.core import ChoiceUsage, OpenedRequest, Principal, PublishedModel, Reservation


class Authenticator(Protocol):
    async def authenticate(self, authorization: str | None) -> Principal:
        """Whom ``Bearer tr-...`` stands for. Raises ``Unauthenticated``."""


class ModelCatalog(Protocol):
    async def resolve(self, principal: Principal, name: str) -> PublishedModel:
        """The model called ``tenant/model``, or ``model`` in the principal's own tenant. Raises ``NotFound``."""

    async def models(self, principal: Principal) -> list[PublishedModel]:
        """All models the principal may call, by name."""


class RequestLedger(Protocol):
    async def open(self, opened: OpenedRequest) -> None:
        """Returns once the row is committed. Raises ``Unavailable``."""

    async def settle(self, request_id: str, usages: Sequence[ChoiceUsage]) -> int:
        """Bills the request; returns its cost in nano-units once committed. A second call changes nothing."""


class RequestLimiter(Protocol):
    async def admit(
        self, principal: Principal, model: PublishedModel, num_prompt_tokens: int, max_output_tokens: int
    ) -> Reservation:
        """Takes one request from the key's rate and the largest possible cost from the tenant's budget.

        ``max_output_tokens`` is of all choices together. Raises ``RateLimited`` or ``QuotaExceeded``.
        """

    async def release(self, reservation: Reservation, cost_nano: int) -> None:
        """Ends the reservation; ``cost_nano`` is what was really spent. Never raises for an absent Redis."""
