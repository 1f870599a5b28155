"""Whether a key and its tenant have enough left for a request: the rule, without its state. Pure.

Requests and tokens per minute are buckets that refill evenly. A request takes its tokens before it runs, as many as it
may use at most; what it did not use comes back when it ends, and what it used beyond that is a debt of the bucket.
``lua_scripts.ADMIT`` is the same rule on Redis's state; a property test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from torchrelay.gateway.core import BudgetPeriod, Limits

KEY, TENANT = 0, 1  # the places of the two in every sequence of limits or uses
UNKNOWN: Final = -1  # spending that must be read from SQL


class Outcome(StrEnum):
    OK = "ok"
    REQUESTS = "requests"
    TOKENS = "tokens"
    RUNNING = "running"
    BUDGET = "budget"
    SPENT = "spent?"  # the spending is unknown


@dataclass(frozen=True, slots=True)
class Wish:
    """A request's needs. An amount above the budget is reduced in steps, to no less than the least."""

    num_requests: int = 0  # of the rate: 0 for a further prompt of a call
    num_running: int = 0
    num_tokens: int = 0
    amount_nano: int = 0
    least_nano: int = 0
    step_nano: int = 0  # 0: the amount is not reduced


@dataclass(slots=True)
class Use:
    """The use of a key's or tenant's limits, and the rest of its rates."""

    requests_left: float = 0.0  # 0 without a limit, as is the next
    tokens_left: float = 0.0
    num_running: int = 0
    reserved_nano: int = 0
    spent_nano: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    place: int  # KEY or TENANT, whichever refuses
    wait_s: float  # until the rate has enough
    amount_nano: int  # of the budget, as reduced
    uses: tuple[Use, Use]  # before the request


def decide(wish: Wish, limits: Sequence[Limits], uses: tuple[Use, Use]) -> Verdict:
    """The verdict on a request; changes nothing."""
    amount = wish.amount_nano
    for place in (KEY, TENANT):
        limit, use = limits[place], uses[place]
        if limit.budget_nano is None:
            continue
        if use.spent_nano < 0:
            return Verdict(Outcome.SPENT, place, 0.0, 0, uses)
        rest = limit.budget_nano - use.spent_nano - wish.least_nano
        if wish.step_nano > 0 and use.spent_nano + amount > limit.budget_nano and rest >= 0:
            amount = wish.least_nano + rest - rest % wish.step_nano
    for place in (KEY, TENANT):
        outcome, wait_s = _refusal(wish, amount, limits[place], uses[place])
        if outcome is not Outcome.OK:
            return Verdict(outcome, place, wait_s, amount, uses)
    return Verdict(Outcome.OK, KEY, 0.0, amount, uses)


def _refusal(wish: Wish, amount: int, limit: Limits, use: Use) -> tuple[Outcome, float]:
    if limit.budget_nano is not None and use.spent_nano + use.reserved_nano + amount > limit.budget_nano:
        return Outcome.BUDGET, 0.0
    if limit.concurrent_requests is not None and use.num_running + wish.num_running > limit.concurrent_requests:
        return Outcome.RUNNING, 0.0
    if limit.requests_per_minute is not None and use.requests_left < wish.num_requests:
        return Outcome.REQUESTS, (wish.num_requests - use.requests_left) * 60 / limit.requests_per_minute
    if limit.tokens_per_minute is not None:
        needed = min(wish.num_tokens, limit.tokens_per_minute)  # a full share admits a larger request, as a debt
        if use.tokens_left < needed:
            return Outcome.TOKENS, (needed - use.tokens_left) * 60 / limit.tokens_per_minute
    return Outcome.OK, 0.0


def period_bounds(period: BudgetPeriod | None, at_unix_us: int) -> tuple[int, int | None]:
    """[begin, end) of a budget's period in UTC, in Unix microseconds; (0, None) for a budget without one."""
    if period is None:
        return 0, None
    day = datetime.fromtimestamp(at_unix_us / 1e6, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        begin, end = day, day + timedelta(days=1)
    elif period == "week":
        begin = day - timedelta(days=day.weekday())
        end = begin + timedelta(weeks=1)
    else:
        begin = day.replace(day=1)
        end = (begin + timedelta(days=31)).replace(day=1)
    return int(begin.timestamp()) * 1_000_000, int(end.timestamp()) * 1_000_000


def share_of(limits: Limits, num_gateways: int, spent_nano: int) -> Limits:
    """A gateway's part of limits that it cannot share, at least one request and token of each."""

    def part(number: int | None) -> int | None:
        return None if number is None else max(1, number // num_gateways)

    budget = limits.budget_nano
    if budget is not None and spent_nano >= 0:
        budget = min(budget, spent_nano + max(0, budget - spent_nano) // num_gateways)
    return Limits(
        part(limits.requests_per_minute),
        part(limits.tokens_per_minute),
        part(limits.concurrent_requests),
        budget,
        limits.budget_period,
    )


def refilled(left: float, per_minute: int, elapsed_s: float) -> float:
    """Returns what is left of a rate after so many seconds."""
    return min(float(per_minute), left + max(0.0, elapsed_s) * per_minute / 60)


def least_left(limit: int | None, left: float, other_limit: int | None, other_left: float) -> tuple[int, float] | None:
    """Returns the limit and the rest of whichever rate has less left; None without a limit."""
    pairs = [(number, rest) for number, rest in ((limit, left), (other_limit, other_left)) if number is not None]
    return min(pairs, key=lambda pair: pair[1], default=None)


def is_above(limits: Sequence[Limits], num_tokens: int) -> int | None:
    """The place of the limit of tokens per minute that so many tokens can never meet."""
    most = [math.inf if each.tokens_per_minute is None else each.tokens_per_minute for each in limits]
    return next((place for place in (KEY, TENANT) if num_tokens > most[place]), None)
