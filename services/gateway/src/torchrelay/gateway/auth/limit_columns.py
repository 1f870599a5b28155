"""The columns of limits, which keys and tenants have by the same names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from sqlalchemy import Row

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.core import Limits

LIMITS: Final = tuple(each.name for each in fields(Limits))


def limits_of(row: Row[Any], prefix: str = "") -> Limits:
    """The limits in a row whose columns have this prefix."""
    return Limits(*(getattr(row, prefix + name) for name in LIMITS))


def check_period(limits: Limits) -> None:
    """Raises ``InvalidRequest`` for a period without a budget."""
    if limits.budget_period is not None and limits.budget_nano is None:
        raise InvalidRequest("budget_period needs budget_nano, the budget of each period", field="budget_period")
