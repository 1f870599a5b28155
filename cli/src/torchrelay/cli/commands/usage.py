"""`torchrelay usage` and `torchrelay bill`: usage and its cost."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from torchrelay.cli.api.access import (
    Access,
    AdminKeyOption,
    HomeOption,
    JsonOption,
    KeyOption,
    UrlOption,
    admin_access,
    tenant_access,
)
from torchrelay.cli.api.client import GatewayClient, given, near_name
from torchrelay.cli.command_group import has_subcommand
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.console import ResultTable

USAGE_EXAMPLE = "Example:  torchrelay usage --by day --from 2026-11-01"
BILL_EXAMPLE = "Example:  torchrelay bill --month 2026-11"
EXPORT_EXAMPLE = (
    "Example:  torchrelay usage export --format csv --from 2026-11-01 --output november.csv\n\n"
    "Resume:   torchrelay usage export --after 41822 >> usage.jsonl"
)
_NUMBERS = ("requests", "prompt", "cached", "output", "cost", "amount")

app, bills = typer.Typer(invoke_without_command=True), typer.Typer(invoke_without_command=True)
BeginOption = Annotated[str | None, typer.Option("--from", help="First day or time (UTC).", metavar="TIME")]
EndOption = Annotated[str | None, typer.Option("--to", help="Last day, or time to end before (UTC).", metavar="TIME")]
TenantOption = Annotated[str | None, typer.Option(help="Tenant; with the admin key only.")]


class GroupBy(StrEnum):
    model = "model"
    key = "key"
    day = "day"


class Format(StrEnum):
    jsonl = "jsonl"
    csv = "csv"
    focus = "focus"


@app.callback()
def usage(
    context: typer.Context,
    by: Annotated[GroupBy, typer.Option(help="What each row stands for.")] = GroupBy.model,
    begin: BeginOption = None,
    end: EndOption = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    key_id: Annotated[str | None, typer.Option(help="Only this key, by its id (see `key list`).")] = None,
    tenant: TenantOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show requests, tokens and their exact cost; with the admin key, of all tenants. Export them."""
    if has_subcommand(context):
        return
    access = _access(home, url, key, tenant)
    wanted = {"group_by": by.value, "from": begin, "to": end, "model": model, "key": key_id, "tenant": tenant}
    with access.client() as client:
        report = client.call("GET", "/v1/usage", params=given(**wanted))
        if not report["data"]:
            _check_names(client, f"{tenant}/{model}" if tenant and model and "/" not in model else model, key_id)
    if as_json:
        console.print_json(report)
    elif not report["data"]:
        console.err().print("no usage yet")
    else:
        console.out().print(usage_table(report, by.value))


@app.command(epilog=EXPORT_EXAMPLE)
def export(
    format_: Annotated[
        Format, typer.Option("--format", help="jsonl and csv: a line per answer; focus: FOCUS 1.2, for tools of cost.")
    ] = Format.jsonl,
    after: Annotated[int, typer.Option(min=0, help="The last id of the export before; only later rows follow.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of answers.")] = None,
    begin: BeginOption = None,
    end: EndOption = None,
    tenant: TenantOption = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write; default: standard output.", metavar="FILE", dir_okay=False)
    ] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Export what was billed, in the order of ids, each answer once: the last id is where the next export begins."""
    wanted = {"format": format_.value, "after": after, "limit": limit, "from": begin, "to": end, "tenant": tenant}
    with ExitStack() as stack:
        client = stack.enter_context(_access(home, url, key, tenant).client())
        lines = stack.enter_context(client.stream("GET", "/v1/usage/export", params=given(**wanted)))
        file = sys.stdout.buffer if output is None else stack.enter_context(output.open("wb"))
        for line in lines:
            file.write(line + b"\n")


def _check_names(client: GatewayClient, model: str | None, key_id: str | None) -> None:
    """Raises ``CliError`` for a model or key that does not exist."""
    if model is not None:
        client.call("GET", f"/v1/models/{quote(model)}")
    if key_id is not None:
        listed = client.call("GET", "/v1/keys")
        known = [each["id"] for each in listed["data"]]
        if key_id not in known:
            near = near_name(key_id, known)
            hint = f"did you mean {near}?" if near else "see: torchrelay key list"
            raise CliError(f"the key {key_id!r} does not exist", hint)


def usage_table(report: dict[str, Any], by: str) -> Table:
    columns = (by, "requests", "prompt", "cached", "output", "cost")
    table = ResultTable(*columns, right=_NUMBERS, names=(by,), is_narrow=True)
    table.show_footer = len(report["data"]) > 1
    for row in report["data"]:
        table.add_line(str(row[by]), *_quantities(row), f"${row['cost']}")
    total = report["total"]
    for column, text in zip(table.columns, ("total", *_quantities(total), f"${total['cost']}"), strict=True):
        column.footer = text
    return table


class Print(StrEnum):
    csv = "csv"
    html = "html"


@bills.callback()
def bill(
    context: typer.Context,
    month: Annotated[
        str | None, typer.Option("--month", "--period", help="As in 2026-11; the current month (UTC) by default.")
    ] = None,
    format_: Annotated[
        Print | None, typer.Option("--format", help="Print the invoice as CSV, or as a page for a browser to print.")
    ] = None,
    tenant: TenantOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the bill of a month: one line per model and price, each rounded once. Adjust and close it (admin)."""
    if has_subcommand(context):
        return
    access = _access(home, url, key, tenant)
    if access.is_admin and not tenant:
        raise CliError("with the admin key, --tenant is required", "name the tenant: --tenant NAME")
    period = month or datetime.now(UTC).strftime("%Y-%m")
    with access.client() as client:
        wanted = given(tenant=tenant, format=None if format_ is None else format_.value)
        content = client.content("GET", f"/v1/invoices/{quote(period)}", params=wanted)
    if format_ is not None:
        typer.echo(content.decode(), nl=False)
    elif as_json:
        console.print_json(json.loads(content))
    else:
        console.out().print(bill_table(json.loads(content)))


@bills.command("close", epilog="Example:  torchrelay bill close 2026-11")
def close_month(
    month: Annotated[str, typer.Argument(metavar="MONTH", help="As in 2026-11.")],
    tenant: Annotated[str | None, typer.Option(help="Only this tenant; default: all.")] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Number the bills of a past month, from an hour after its end; they do not change any more (admin)."""
    with admin_access(home, url, key).client() as client:
        closed = client.call("POST", f"/v1/invoices/{quote(month)}/close", params=given(tenant=tenant))
    if as_json:
        console.print_json(closed)
        return
    table = ResultTable("number", "tenant", "amount", right=_NUMBERS, names=("tenant",), is_narrow=True)
    for each in closed["data"]:
        table.add_line(str(each["number"]), each["tenant"], f"{each['amount']} {each['currency']}")
    console.out().print(table)


@bills.command(
    epilog="Example:  torchrelay bill adjust acme --month 2026-11 --amount -12.50 --reason 'outage of 3 November'"
)
def adjust(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    month: Annotated[str, typer.Option(help="An open month, as in 2026-11.")],
    amount: Annotated[str, typer.Option(help="Dollars; negative: a credit.", metavar="DOLLARS")],
    reason: Annotated[str, typer.Option(help="As the bill shows it.")],
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Add a charge or a credit to a month that is not closed, and to what the tenant has spent (admin)."""
    try:
        nano = Decimal(amount).scaleb(9)
        amount_nano = int(nano)
    except (ArithmeticError, ValueError):
        raise typer.BadParameter(f"{amount!r} is not a number", param_hint="--amount") from None
    if amount_nano != nano or not amount_nano:
        raise typer.BadParameter(f"{amount!r} must not be 0, and have at most nine decimals", param_hint="--amount")
    body = {"tenant": tenant, "period": month, "amount_nano": amount_nano, "reason": reason}
    with admin_access(home, url, key).client() as client:
        adjustment = client.call("POST", "/v1/adjustments", json=body)
    console.out().print(f"adjusted [bold]{tenant}[/], {month}: {adjustment['amount']} dollars")


def bill_table(monthly_bill: dict[str, Any]) -> Table:
    number = "" if monthly_bill["number"] is None else f", closed as number {monthly_bill['number']}"
    title = f"Bill of {monthly_bill['tenant']}, {monthly_bill['period']}{number}"
    columns = ("model", "requests", "prompt", "cached", "output", "amount")
    table = ResultTable(*columns, right=_NUMBERS, names=("model",), title=title, is_narrow=True)
    table.show_footer = True
    for line in monthly_bill["lines"]:
        table.add_line(line["model"], *_quantities(line), f"{line['amount']} {monthly_bill['currency']}")
    for each in monthly_bill["adjustments"]:
        table.add_line(each["reason"], "", "", "", "", f"{each['amount']} {monthly_bill['currency']}")
    table.columns[0].footer = "total"
    table.columns[-1].footer = f"{monthly_bill['amount']} {monthly_bill['currency']}"
    return table


def _access(home: Any, url: str | None, key: str | None, tenant: str | None) -> Access:
    """Uses the local admin key for a named tenant, not the saved key of another tenant."""
    access = tenant_access(home, url, key)
    if tenant and access.home is not None and key is None:
        return Access(access.url, access.home.admin_key(), access.home)
    return access


def _quantities(row: dict[str, Any]) -> tuple[str, str, str, str]:
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    requests, prompt, cached, output = (f"{row[name]:,}" for name in names)
    return requests, prompt, cached, output
