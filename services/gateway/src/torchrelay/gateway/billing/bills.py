"""Bills: a tenant's month as lines, each rounded once, half up, from integer nano-dollars to cents. Pure."""

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
    """What one model used at one price."""

    model: str
    prompt_nano: int
    cached_nano: int
    output_nano: int
    prompt_tokens: int  # cached ones included
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
    """``amount`` is the sum of the rounded lines, so that a reader can add them up."""

    period: str
    lines: tuple[BillLine, ...]
    cost_nano: int
    amount: Decimal


def bill_of(period: str, sums: Sequence[BilledSum]) -> Bill:
    """The bill over the sums of a period."""
    lines = tuple(BillLine(billed, amount_of(billed.cost_nano)) for billed in sums)
    return Bill(
        period=period,
        lines=lines,
        cost_nano=sum(billed.cost_nano for billed in sums),
        amount=sum((line.amount for line in lines), Decimal("0.00")),
    )


def month_bounds(period: str) -> tuple[int, int]:
    """[begin, end) of ``2026-11`` in unix microseconds, UTC. Raises ``InvalidRequest``."""
    form = _PERIOD.fullmatch(period)
    if form is None:
        raise InvalidRequest(f"{period!r} is no month: write it like 2026-11", field="period")
    year, month = int(form[1]), int(form[2])
    begin = datetime(year, month, 1, tzinfo=UTC)
    end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return int(begin.timestamp()) * 1_000_000, int(end.timestamp()) * 1_000_000
