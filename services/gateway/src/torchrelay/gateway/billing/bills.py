"""Monthly invoices: lines in nano-dollars, each rounded once, half up, to cents. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.billing.money import amount_of

_PERIOD = re.compile(r"([12]\d{3})-(0[1-9]|1[0-2])")


@dataclass(frozen=True, slots=True)
class BilledSum:
    """A line of an invoice: the usage of one model at one price."""

    model: str
    prompt_nano: int
    cached_nano: int
    output_nano: int
    prompt_tokens: int  # including cached tokens
    cached_tokens: int
    completion_tokens: int
    requests: int
    cost_nano: int

    @property
    def amount(self) -> Decimal:
        """Dollars and cents."""
        return amount_of(self.cost_nano)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A charge beside usage, or a credit, which is negative."""

    adjustment_id: str
    tenant_id: str
    period: str
    amount_nano: int
    reason: str
    created_unix_us: int

    @property
    def amount(self) -> Decimal:
        """Dollars and cents."""
        return amount_of(self.amount_nano)


@dataclass(frozen=True, slots=True)
class Invoice:
    """The usage and adjustments of a tenant in a month. Number and time are None until it is closed."""

    tenant: str
    period: str  # such as 2026-11
    lines: tuple[BilledSum, ...]
    adjustments: tuple[Adjustment, ...]
    number: int | None = None
    closed_unix_us: int | None = None

    @property
    def cost_nano(self) -> int:
        return sum(line.cost_nano for line in self.lines) + sum(each.amount_nano for each in self.adjustments)

    @property
    def amount(self) -> Decimal:
        """The sum of the rounded lines, so that the invoice adds up."""
        amounts = [line.amount for line in self.lines] + [each.amount for each in self.adjustments]
        return sum(amounts, Decimal("0.00"))

    @property
    def amount_nano(self) -> int:
        return int(self.amount.scaleb(9))


def month_bounds(period: str) -> tuple[int, int]:
    """[begin, end) of a month such as ``2026-11`` in Unix microseconds, UTC. Raises ``InvalidRequest``."""
    match = _PERIOD.fullmatch(period)
    if match is None:
        raise InvalidRequest(f"{period!r} is not a valid month; use YYYY-MM", field="period")
    year, month = int(match[1]), int(match[2])
    begin = datetime(year, month, 1, tzinfo=UTC)
    end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return int(begin.timestamp()) * 1_000_000, int(end.timestamp()) * 1_000_000
