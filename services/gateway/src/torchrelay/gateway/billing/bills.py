"""Monthly bills: lines in nano-dollars, each rounded once, half up, to cents. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing.money import amount_of

_PERIOD = re.compile(r"([12]\d{3})-(0[1-9]|1[0-2])")


@dataclass(frozen=True, slots=True)
class BilledSum:
    """The usage of one model at one price."""

    model: str
    prompt_nano: int
    cached_nano: int
    output_nano: int
    prompt_tokens: int  # including cached tokens
    cached_tokens: int
    completion_tokens: int
    requests: int
    cost_nano: int


@dataclass(frozen=True, slots=True)
class BillLine:
    billed: BilledSum
    amount: Decimal  # dollars and cents


@dataclass(frozen=True, slots=True)
class Bill:
    """``amount`` is the sum of the rounded lines, so that the bill adds up."""

    period: str
    lines: tuple[BillLine, ...]
    cost_nano: int
    amount: Decimal


def bill_of(period: str, sums: Sequence[BilledSum]) -> Bill:
    """The bill for a period's sums."""
    lines = tuple(BillLine(billed, amount_of(billed.cost_nano)) for billed in sums)
    return Bill(
        period=period,
        lines=lines,
        cost_nano=sum(billed.cost_nano for billed in sums),
        amount=sum((line.amount for line in lines), Decimal("0.00")),
    )


def month_bounds(period: str) -> tuple[int, int]:
    """[begin, end) of a month such as ``2026-11`` in Unix microseconds, UTC. Raises ``InvalidRequest``."""
    match = _PERIOD.fullmatch(period)
    if match is None:
        raise InvalidRequest(f"{period!r} is not a valid month; use YYYY-MM", field="period")
    year, month = int(match[1]), int(match[2])
    begin = datetime(year, month, 1, tzinfo=UTC)
    end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return int(begin.timestamp()) * 1_000_000, int(end.timestamp()) * 1_000_000
