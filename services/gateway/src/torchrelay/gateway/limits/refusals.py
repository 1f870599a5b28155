"""The errors for callers whose key or tenant has reached a limit."""

from __future__ import annotations

from datetime import UTC, datetime

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest, QuotaExceeded, RateLimited, TorchrelayError
from torchrelay.gateway.billing.money import dollars
from torchrelay.gateway.core import Limits, Principal, RateLeft, RatesLeft
from torchrelay.gateway.limits.admission import (
    KEY,
    TENANT,
    Outcome,
    Verdict,
    Wish,
    least_left,
    period_bounds,
)

_RETRY_S = 1.0  # running requests usually use a small part of what they reserve


class RateExceeded(RateLimited):
    """A key or tenant has used its requests or tokens of the minute."""

    def __init__(self, message: str, rates: RatesLeft, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.rates = rates


def rates_left(
    limits: tuple[Limits, Limits], verdict: Verdict, num_requests: int = 0, num_tokens: int = 0
) -> RatesLeft:
    """The rates that bind first, after so many requests and tokens have been taken."""
    (key, tenant), (of_key, of_tenant) = limits, verdict.uses
    requests = least_left(
        key.requests_per_minute, of_key.requests_left, tenant.requests_per_minute, of_tenant.requests_left
    )
    tokens = least_left(key.tokens_per_minute, of_key.tokens_left, tenant.tokens_per_minute, of_tenant.tokens_left)
    return RatesLeft(
        requests and RateLeft(requests[0], requests[1] - num_requests),
        tokens and RateLeft(tokens[0], tokens[1] - num_tokens),
    )


def too_large(principal: Principal, place: int, num_tokens: int) -> InvalidRequest:
    """The refusal of a request that a limit of tokens per minute can never admit."""
    limit = _limits(principal)[place].tokens_per_minute
    return InvalidRequest(
        f"this request may use {num_tokens:,} tokens, its prompt and max_tokens, but {_bearer(principal, place)} "
        f"allows {limit:,} a minute: lower max_tokens or shorten the prompt",
        field="max_tokens",
    )


def refusal(principal: Principal, wish: Wish, verdict: Verdict) -> TorchrelayError:
    """The error for a verdict that is not ``OK``."""
    limit, bearer = _limits(principal)[verdict.place], _bearer(principal, verdict.place)
    rates = rates_left(_limits(principal), verdict)
    if verdict.outcome is Outcome.REQUESTS:
        message = f"rate limit exceeded: {bearer} allows {limit.requests_per_minute:,} requests per minute"
        return RateExceeded(message, rates, verdict.wait_s)
    if verdict.outcome is Outcome.TOKENS:
        left = max(0, int(verdict.uses[verdict.place].tokens_left))
        message = (
            f"rate limit exceeded: {bearer} allows {limit.tokens_per_minute:,} tokens per minute, of which {left:,} "
            f"are left; this request reserves {wish.num_tokens:,} for its prompt and answer"
        )
        return RateExceeded(message, rates, verdict.wait_s)
    if verdict.outcome is Outcome.RUNNING:
        message = f"{bearer} allows {limit.concurrent_requests:,} requests at once, and as many run: try again"
        return RateLimited(message, retry_after_s=_RETRY_S)
    return _of_budget(principal, wish, verdict)


def _of_budget(principal: Principal, wish: Wish, verdict: Verdict) -> TorchrelayError:
    limit, use = _limits(principal)[verdict.place], verdict.uses[verdict.place]
    assert limit.budget_nano is not None
    per = f" per {limit.budget_period}" if limit.budget_period else ""
    budget = f"budget of {dollars(limit.budget_nano)}{per} of {_owner(principal, verdict.place)}"
    if use.spent_nano + wish.least_nano <= limit.budget_nano:
        return RateLimited(
            f"running requests reserve {dollars(use.reserved_nano)} of the {budget}; try again once they have ended, "
            "or lower max_tokens",
            retry_after_s=_RETRY_S,
        )
    least = dollars(wish.least_nano)
    wishes = f"costs at least {least}; shorten the prompt" if wish.step_nano else f"may cost {least}; lower max_tokens"
    _, end_us = period_bounds(limit.budget_period, now_unix_us())
    anew = f", wait until {datetime.fromtimestamp(end_us / 1e6, UTC):%Y-%m-%d %H:%M} UTC" if end_us else ""
    command = (
        f"torchrelay tenant set {principal.tenant} --budget DOLLARS"
        if verdict.place == TENANT
        else f"torchrelay key set {principal.key_id} --budget DOLLARS"
    )
    whom = "the admin" if verdict.place == TENANT else "the owner of the tenant's keys"
    return QuotaExceeded(
        f"{budget} exceeded: {dollars(use.spent_nano)} spent, {dollars(use.reserved_nano)} reserved by running "
        f"requests, and this one {wishes}{anew}, or ask {whom} to raise the budget: {command}"
    )


def _limits(principal: Principal) -> tuple[Limits, Limits]:
    return principal.limits, principal.tenant_limits


def _bearer(principal: Principal, place: int) -> str:
    return "this key" if place == KEY else f"the tenant {principal.tenant}, with all its keys,"


def _owner(principal: Principal, place: int) -> str:
    return "this key" if place == KEY else f"tenant {principal.tenant}"
