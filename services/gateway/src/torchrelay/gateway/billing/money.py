"""Integer nano-dollars as text and as rounded amounts."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

CURRENCY = "USD"
_NANO = Decimal(1_000_000_000)
_CENT = Decimal("0.01")


def amount_of(cost_nano: int) -> Decimal:
    """Dollars and cents of nano-dollars, half a cent up."""
    return (Decimal(cost_nano) / _NANO).quantize(_CENT, rounding=ROUND_HALF_UP)


def exact_amount(cost_nano: int) -> str:
    """All nine decimals, as text: for usage, where nothing is rounded."""
    return f"{Decimal(cost_nano) / _NANO:.9f}"


def dollars(nano: int) -> str:
    """``$1.50``, ``$0.000204``: exact, with cents at least, for messages."""
    whole, _, part = exact_amount(nano).partition(".")
    return f"${whole}.{part.rstrip('0').ljust(2, '0')}"
