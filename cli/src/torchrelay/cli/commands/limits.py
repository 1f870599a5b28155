"""Options and texts of limits, which keys and tenants have alike."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import typer

NANO = 1_000_000_000


def limit(text: str, option: str) -> float | None:
    """A non-negative number; ``none``: no limit."""
    if text == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise typer.BadParameter(f"{text!r} must be a non-negative number or 'none'", param_hint=option)
    return number


RequestsOption = Annotated[
    str | None, typer.Option("--requests-per-minute", help="Requests per minute; none: no limit.", metavar="N|none")
]
TokensOption = Annotated[
    str | None,
    typer.Option("--tokens-per-minute", help="Tokens of prompts and answers per minute.", metavar="N|none"),
]
ConcurrentOption = Annotated[
    str | None, typer.Option("--concurrent-requests", help="Requests at once.", metavar="N|none")
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", help="Maximum spending, in dollars; none: no limit.", metavar="DOLLARS|none")
]
PeriodOption = Annotated[
    Literal["day", "week", "month", "none"] | None,
    typer.Option("--budget-period", help="The budget is of each day, week or month in UTC; none: of all time."),
]


def limit_fields(
    requests: str | None, tokens: str | None, concurrent: str | None, budget: str | None, period: str | None
) -> dict[str, int | str | None]:
    """The given options as fields of the REST API."""
    given = {
        "requests_per_minute": ("--requests-per-minute", requests, 1),
        "tokens_per_minute": ("--tokens-per-minute", tokens, 1),
        "concurrent_requests": ("--concurrent-requests", concurrent, 1),
        "budget_nano": ("--budget", budget, NANO),
    }
    read = {field: (limit(text, option), unit) for field, (option, text, unit) in given.items() if text is not None}
    fields: dict[str, int | str | None] = {
        field: None if number is None else round(number * unit) for field, (number, unit) in read.items()
    }
    if period is not None or fields.get("budget_nano", 0) is None:  # a period without a budget means nothing
        fields["budget_period"] = None if period == "none" else period
    return fields


def limits_text(shown: dict[str, Any]) -> str:
    """The limits of a key or tenant in a few words."""
    texts = [
        f"{shown[field]:,} {words}"
        for field, words in (
            ("requests_per_minute", "requests/min"),
            ("tokens_per_minute", "tokens/min"),
            ("concurrent_requests", "at once"),
        )
        if shown.get(field) is not None
    ]
    if shown.get("budget_nano") is not None:
        texts.append(budget_text(shown))
    return ", ".join(texts) or "no limit"


def budget_text(shown: dict[str, Any]) -> str:
    """The budget of a key or tenant, and its period."""
    from torchrelay.gateway.billing.money import dollars  # imports gRPC: not for `torchrelay --help`

    if shown.get("budget_nano") is None:
        return "no limit"
    period = f"/{shown['budget_period']}" if shown.get("budget_period") else ""
    return f"{dollars(shown['budget_nano'])}{period}"
