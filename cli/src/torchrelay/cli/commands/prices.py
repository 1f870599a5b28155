"""`torchrelay prices`: what tokens cost, now and later."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Annotated, Any

import typer

from torchrelay.cli.api.access import (
    AdminKeyOption,
    HomeOption,
    JsonOption,
    KeyOption,
    UrlOption,
    admin_access,
    tenant_access,
)
from torchrelay.cli.api.client import given
from torchrelay.cli.command_group import has_subcommand
from torchrelay.cli.views import console
from torchrelay.cli.views.console import ResultTable

EXAMPLE = (
    "Example:  torchrelay prices\n\nOf all:   torchrelay prices set --prompt 0.10 --output 0.40\n\n"
    "Of one:   torchrelay prices set acme/glossary --prompt 0.20 --cached 0.05 --output 0.80\n\n"
    "Batches:  torchrelay prices set --service batch --prompt 0.05 --output 0.20"
)
PER_MILLION = "dollars per million tokens"
_NANO_PER_TOKEN = 1000  # of a dollar per million tokens
_KINDS = ("prompt", "cached", "output")
app = typer.Typer(invoke_without_command=True)


class Service(StrEnum):
    """The services that can have prices of their own."""

    BATCH = "batch"


def _nano_per_token(text: str) -> int:
    """Nano-dollars per token for dollars per million tokens. Raises ``BadParameter``."""
    try:
        nano = Decimal(text) * _NANO_PER_TOKEN
    except InvalidOperation:
        raise typer.BadParameter(f"{text!r} is not a number") from None
    if not nano.is_finite() or nano < 0 or nano != nano.to_integral_value():
        raise typer.BadParameter(f"{text!r} must be at least 0, with at most three decimals")
    return int(nano)


def price_texts(price: dict[str, Any]) -> tuple[str, ...]:
    """Prices of prompt, cached prompt and output tokens, in dollars per million."""
    return tuple(f"${Decimal(price[f'{kind}_nano']) / _NANO_PER_TOKEN:.3f}" for kind in _KINDS)


def is_ended(price: dict[str, Any], now: datetime) -> bool:
    return price["valid_to"] is not None and datetime.fromisoformat(price["valid_to"]) <= now


def current_price(prices: Iterable[dict[str, Any]], model: str, now: datetime) -> dict[str, Any]:
    """The row that applies to a model's requests outside batches: its own, or else the default."""
    prices = [each for each in prices if not each.get("service")]
    valid = [each for each in prices if datetime.fromisoformat(each["valid_from"]) <= now and not is_ended(each, now)]
    return next((each for each in valid if each["model"] == model), None) or next(
        each for each in valid if each["model"] is None
    )


@app.callback()
def prices(
    context: typer.Context,
    show_all: Annotated[bool, typer.Option("--all", help="Prices that have ended too.")] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the prices of this key's models (all, with the admin key), in dollars per million tokens; set one."""
    if has_subcommand(context):
        return
    with tenant_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/prices")
    if as_json:
        console.print_json(listed)
        return
    now = datetime.now(UTC)
    columns = ("model", "service", *_KINDS, "from", "until")
    is_plain = not any(price["service"] for price in listed["data"])
    hidden = ("service",) if is_plain else ()
    table = ResultTable(*columns, right=_KINDS, names=("model",), without=hidden, is_narrow=True)
    for price in listed["data"]:
        if show_all or not is_ended(price, now):
            name = price["model"] or "(default)"
            table.add_line(name, price["service"], *price_texts(price), *_times(price))
    console.out().print(table)
    console.err().print(f"[dim]{PER_MILLION}; cached: prompt tokens found in the prefix cache; times in UTC[/]")


def _times(price: dict[str, Any]) -> tuple[str, str]:
    begin, end = price["valid_from"], price["valid_to"]
    # The default price of the platform is valid from 1970 on.
    return "" if begin.startswith("1970-") else begin[:16].replace("T", " "), (end or "")[:16].replace("T", " ")


@app.command(
    "set",
    epilog="Example:  torchrelay prices set acme/glossary --prompt 0.20 --cached 0.05 --output 0.80\n\n"
    "Default:  torchrelay prices set --prompt 0.10 --output 0.40 --from 2027-01-01",
)
def set_price(
    prompt: Annotated[str, typer.Option(help="Dollars per million prompt tokens.", metavar="DOLLARS")],
    output: Annotated[str, typer.Option(help="Dollars per million output tokens.", metavar="DOLLARS")],
    model: Annotated[
        str | None, typer.Argument(metavar="[TENANT/MODEL]", help="Default: all without own price.")
    ] = None,
    cached: Annotated[
        str | None,
        typer.Option(help="The same of prompt tokens found in the cache; default: as --prompt.", metavar="DOLLARS"),
    ] = None,
    service: Annotated[
        Service | None, typer.Option(help="batch: of the requests in batches; default: of all others.")
    ] = None,
    begin: Annotated[
        str | None, typer.Option("--from", help="Day or time (UTC); default: now.", metavar="TIME")
    ] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Set the price of a model, or the default, from now on or later (admin). A price in the list is never changed."""
    if cached is not None and _nano_per_token(cached) > _nano_per_token(prompt):
        raise typer.BadParameter(f"--cached must be at most --prompt ({prompt}), not {cached}")
    nano = {
        "prompt_nano": _nano_per_token(prompt),
        "cached_nano": _nano_per_token(cached or prompt),
        "output_nano": _nano_per_token(output),
    }
    with admin_access(home, url, key).client() as client:
        price = client.call("PUT", "/v1/prices", json=nano | given(model=model, valid_from=begin, service=service))
    of_prompt, of_cached, of_output = price_texts(price)
    of_service = f" ({price['service']})" if price["service"] else ""
    name, since = f"{price['model'] or 'default price'}{of_service}", price["valid_from"][:16].replace("T", " ")
    console.out().print(f"[bold]{name}[/]: prompt {of_prompt}, cached {of_cached}, output {of_output} from {since} UTC")
    console.err().print(f"[dim]{PER_MILLION}[/]")
