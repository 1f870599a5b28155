"""The limits of keys and tenants as fields of JSON."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from torchrelay.gateway.core import BudgetPeriod, Limits
from torchrelay.gateway.limits.limiter import LimitsUse
from torchrelay.gateway.whole_number import WholeNumber


class LimitFields(BaseModel):
    """Omitted fields stay unchanged; ``null`` means no limit."""

    model_config = ConfigDict(extra="forbid", strict=True)
    requests_per_minute: WholeNumber | None = Field(default=None, ge=1, lt=2**31)
    tokens_per_minute: WholeNumber | None = Field(default=None, ge=1, lt=2**53)
    concurrent_requests: WholeNumber | None = Field(default=None, ge=1, lt=2**31)
    budget_nano: WholeNumber | None = Field(default=None, ge=0, lt=2**53)
    budget_period: BudgetPeriod | None = None


def limits_shown(limits: Limits) -> dict[str, Any]:
    return asdict(limits)


def use_shown(use: LimitsUse, place: int) -> dict[str, Any]:
    """The limits of a key or tenant, and what it uses and has left of each."""
    limits, used, (begin_us, end_us) = use.limits[place], use.uses[place], use.periods_us[place]
    shown: dict[str, Any] = limits_shown(limits)
    if limits.requests_per_minute is not None:
        shown["requests_left"] = max(0, int(used.requests_left))
    if limits.tokens_per_minute is not None:
        shown["tokens_left"] = max(0, int(used.tokens_left))
    if limits.concurrent_requests is not None:
        shown["requests_running"] = used.num_running
    if limits.budget_nano is not None:
        left = limits.budget_nano - used.spent_nano - used.reserved_nano
        shown |= {"spent_nano": used.spent_nano, "reserved_nano": used.reserved_nano, "left_nano": max(0, left)}
    if end_us is not None:
        shown |= {"period_begin": _iso(begin_us), "period_end": _iso(end_us)}
    return shown


def _iso(unix_us: int) -> str:
    return datetime.fromtimestamp(unix_us / 1e6, UTC).isoformat()
