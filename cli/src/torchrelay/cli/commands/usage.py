"""`torchrelay usage` and `torchrelay bill`: what was used, and what it costs."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from torchrelay.cli.api.access import Access, HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console

USAGE_EXAMPLE = "Example:  torchrelay usage --by day --from 2026-11-01"
BILL_EXAMPLE = "Example:  torchrelay bill --month 2026-11"
_NUMBERS = ("requests", "prompt", "cached", "output", "cost", "amount")

TenantOption = Annotated[str | None, typer.Option(help="With the admin key: of this tenant.")]


class GroupBy(StrEnum):
    model = "model"
    key = "key"
    day = "day"


def usage(
    by: Annotated[GroupBy, typer.Option(help="One line per what.")] = GroupBy.model,
    begin: Annotated[str | None, typer.Option("--from", help="From this day or time (UTC) on.", metavar="TIME")] = None,
    end: Annotated[str | None, typer.Option("--to", help="Until before this day or time.", metavar="TIME")] = None,
    model: Annotated[str | None, typer.Option(help="Of this model only.")] = None,
    key_id: Annotated[str | None, typer.Option(help="Of this key only; its id, see `key list`.")] = None,
    tenant: TenantOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show requests, tokens and their exact cost. With the admin key: of all tenants."""
    access = _access(home, url, key, tenant)
    wanted = {"group_by": by.value, "from": begin, "to": end, "model": model, "key": key_id, "tenant": tenant}
    with access.client() as client:
        found = client.call("GET", "/v1/usage", params=_given(wanted))
    if as_json:
        console.print_json(found)
    elif not found["data"]:
        console.err().print("nothing was used yet")
    else:
        console.out().print(usage_table(found, by.value))


def usage_table(found: dict[str, Any], by: str) -> Table:
    made = console.table(by, "requests", "prompt", "cached", "output", "cost", right=_NUMBERS)
    made.show_footer = len(found["data"]) > 1
    for one in found["data"]:
        made.add_row(str(one[by]), *_quantities(one), f"${one['cost']}")
    total = found["total"]
    for column, text in zip(made.columns, ("total", *_quantities(total), f"${total['cost']}"), strict=True):
        column.footer = text
    return made


def bill(
    month: Annotated[
        str | None, typer.Option("--month", "--period", help="Such as 2026-11; this one by default (UTC).")
    ] = None,
    tenant: TenantOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the bill of a month: a line per model and price, each rounded once."""
    access = _access(home, url, key, tenant)
    if access.is_admin and not tenant:
        raise CliError("the admin key must say whose bill", "name the tenant: --tenant NAME")
    wanted = {"period": month or datetime.now(UTC).strftime("%Y-%m"), "tenant": tenant}
    with access.client() as client:
        found = client.call("GET", "/v1/bill", params=_given(wanted))
    if as_json:
        console.print_json(found)
    else:
        console.out().print(bill_table(found))


def bill_table(found: dict[str, Any]) -> Table:
    title = f"Bill of {found['tenant']}, {found['period']}"
    made = console.table("model", "requests", "prompt", "cached", "output", "amount", right=_NUMBERS, title=title)
    made.show_footer = True
    for line in found["lines"]:
        made.add_row(line["model"], *_quantities(line), f"{line['amount']} {found['currency']}")
    made.columns[0].footer = "total"
    made.columns[-1].footer = f"{found['amount']} {found['currency']}"
    return made


def _access(home: Any, url: str | None, key: str | None, tenant: str | None) -> Access:
    """A named tenant may be any: the local admin key asks, not the saved key of one of them."""
    access = tenant_access(home, url, key)
    if tenant and access.home is not None and key is None:
        return Access(access.url, access.home.admin_key(), access.home)
    return access


def _given(wanted: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if value is not None}


def _quantities(one: dict[str, Any]) -> tuple[str, str, str, str]:
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    requests, prompt, cached, output = (f"{one[name]:,}" for name in names)
    return requests, prompt, cached, output
