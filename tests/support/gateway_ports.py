"""Keys, catalog, ledger and limits in memory: what the token path asks of the rest of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from torchrelay.common.errors import ModelNotFound, NotFound, TorchrelayError, Unauthenticated
from torchrelay.gateway.auth.api_keys import ADMIN
from torchrelay.gateway.core import (
    ChoiceUsage,
    EmbeddingSpec,
    LineResult,
    ModelShape,
    OpenedRequest,
    Price,
    Principal,
    PublishedModel,
    RatesLeft,
    Reservation,
    Version,
)

PRINCIPAL = Principal(tenant_id="t-1", tenant="acme", key_id="k-1")
KEY, ADMIN_KEY = "tr-test", "tr-admin"


def published_model(
    name: str = "acme/echo",
    *,
    file_digests: Mapping[str, str],
    vocab_size: int = 1 << 20,
    context: int = 4096,
    eos_token_ids: tuple[int, ...] = (),
    embedding: EmbeddingSpec | None = None,
    has_no_head: bool = False,
) -> PublishedModel:
    """A model whose numbers mean nothing to anybody but the gateway."""
    version = Version(
        version_id=f"v-{name}",
        pack_id="p" * 64,
        pack_bytes=1 << 20,
        architecture="LlamaForCausalLM",
        dtype="F32",
        shape=ModelShape(2, 2, 16, 4, context, vocab_size),
        routing_block_tokens=64,
        stored_bytes=1 << 20,
        eos_token_ids=eos_token_ids,
        file_digests=dict(file_digests),
        embedding=embedding,
        has_no_head=has_no_head,
    )
    price = Price("price-1", "", 1, 1, 2, 0)
    return PublishedModel(name, PRINCIPAL.tenant_id, version, price, 0.0, 0, 1_700_000_000_000_000)


class InMemoryPorts:
    """All four at once."""

    def __init__(self, models: Sequence[PublishedModel]) -> None:
        self.published = {model.name: model for model in models}
        self.principals = {KEY: PRINCIPAL, ADMIN_KEY: ADMIN}  # by key
        self.opened: list[OpenedRequest] = []
        self.settled: dict[str, list[ChoiceUsage]] = {}
        self.reserved: set[str] = set()
        self.released: dict[str, int] = {}  # with the cost
        self.released_tokens: dict[str, int] = {}
        self.admitted: list[tuple[int, int]] = []  # tokens of prompt and of output at most, per call of ``admit``
        self.admitted_requests: list[int] = []  # per call of ``admit``
        self.max_output_tokens: int | None = None  # what is left of the budget
        self.rates = RatesLeft()  # after each ``admit``
        self.refusal: TorchrelayError | None = None  # what ``admit`` raises
        self.num_until_refusal = 0  # admissions before that
        self.open_error: Exception | None = None
        self.is_open_error_late = False  # the row is there, its answer got lost
        self.settle_errors: list[Exception] = []
        self.may_open = asyncio.Event()
        self.may_open.set()

    async def authenticate(self, authorization: str | None) -> Principal:
        principal = self.principals.get((authorization or "").removeprefix("Bearer "))
        if principal is None:
            raise Unauthenticated("unknown key")
        return principal

    async def resolve(self, principal: Principal, name: str) -> PublishedModel:
        model = self.published.get(name if "/" in name else f"{principal.tenant}/{name}")
        if model is None:
            raise ModelNotFound(f"there is no model {name!r}", field="model")
        return model

    async def models(self, principal: Principal) -> list[PublishedModel]:
        return list(self.published.values())

    async def open(self, opened: OpenedRequest) -> None:
        await self.may_open.wait()
        if self.open_error is None or self.is_open_error_late:
            self.opened.append(opened)
        if self.open_error is not None:
            raise self.open_error

    async def settle(self, request_id: str, usages: Sequence[ChoiceUsage]) -> int:
        if self.settle_errors:
            raise self.settle_errors.pop(0)
        if request_id not in {opened.request_id for opened in self.opened}:
            raise NotFound(f"request {request_id} was never opened")
        self.settled.setdefault(request_id, list(usages))
        return sum(usage.num_output_tokens for usage in usages)

    async def settle_line(self, result: LineResult, parts: Sequence[tuple[str, Sequence[ChoiceUsage]]]) -> int:
        return sum([await self.settle(*part) for part in parts])

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
        if self.refusal is not None and len(self.admitted) >= self.num_until_refusal:
            raise self.refusal
        self.admitted.append((num_prompt_tokens, max_output_tokens))
        self.admitted_requests.append(num_requests)
        if self.max_output_tokens is not None and min_output_tokens is not None:
            most = self.max_output_tokens // min_output_tokens * min_output_tokens
            max_output_tokens = min(max_output_tokens, most)
        reservation_id = f"r-{len(self.reserved) + len(self.released)}"
        reservation = Reservation(
            reservation_id, principal.tenant_id, principal.key_id, max_output_tokens, reserved_nano=1, rates=self.rates
        )
        self.reserved.add(reservation.reservation_id)
        return reservation

    def abandon(self, reservation: Reservation) -> None:
        self.reserved.discard(reservation.reservation_id)
        self.released[reservation.reservation_id] = 0

    async def release(self, reservation: Reservation, cost_nano: int, num_tokens: int) -> bool:
        self.released_tokens[reservation.reservation_id] = num_tokens
        self.reserved.discard(reservation.reservation_id)
        self.released[reservation.reservation_id] = cost_nano
        return True
