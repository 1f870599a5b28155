"""Nano-dollars, the integer unit of the ledger, as rounded and exact amounts."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

CURRENCY = "USD"
_NANO = Decimal(1_000_000_000)
_CENT = Decimal("0.01")


def amount_of(cost_nano: int) -> Decimal:
    """Dollars and cents, rounded half up."""
    return (Decimal(cost_nano) / _NANO).quantize(_CENT, rounding=ROUND_HALF_UP)


def exact(cost_nano: int) -> Decimal:
    """Dollars with all nine decimals."""
    return Decimal(cost_nano).scaleb(-9)


def exact_amount(cost_nano: int) -> str:
    """All nine decimals, as text, for usage reports, which do not round."""
    return format(exact(cost_nano), "f")


def dollars(nano: int) -> str:
    """``$1.50``, ``$0.000204``: exact, with at least two decimals, for messages."""
    whole, _, part = exact_amount(nano).partition(".")
    return f"${whole}.{part.rstrip('0').ljust(2, '0')}"
