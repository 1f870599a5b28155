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
    """A line of a bill: the usage of one model at one price."""

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


def bill_amount(lines: Sequence[BilledSum]) -> Decimal:
    """The sum of the rounded lines, so that the bill adds up."""
    return sum((line.amount for line in lines), Decimal("0.00"))


def month_bounds(period: str) -> tuple[int, int]:
    """[begin, end) of a month such as ``2026-11`` in Unix microseconds, UTC. Raises ``InvalidRequest``."""
    match = _PERIOD.fullmatch(period)
    if match is None:
        raise InvalidRequest(f"{period!r} is not a valid month; use YYYY-MM", field="period")
    year, month = int(match[1]), int(match[2])
    begin = datetime(year, month, 1, tzinfo=UTC)
    end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return int(begin.timestamp()) * 1_000_000, int(end.timestamp()) * 1_000_000
