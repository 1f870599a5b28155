"""`torchrelay webhook`: addresses that get events of usage, budgets and invoices."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import AdminKeyOption, HomeOption, JsonOption, UrlOption, admin_access
from torchrelay.cli.views import console
from torchrelay.cli.views.console import ResultTable

app = typer.Typer(no_args_is_help=True, help="Create, list and delete webhooks (admin).")


@app.command(epilog="Example:  torchrelay webhook create https://billing.example/events --type usage --tenant acme")
def create(
    address: Annotated[str, typer.Argument(metavar="URL", help="Where batches of CloudEvents are posted.")],
    type_: Annotated[
        list[str] | None,
        typer.Option("--type", help="usage, budget.warning or invoice.closed; repeat for more. Default: all."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Events of this tenant alone.")] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Create a webhook for events from now on, and show the secret of its signatures; it cannot be shown again.

    Only the secret goes to standard output. Signatures are those of Standard Webhooks; events come at least once.
    """
    given = {"url": address, "types": type_, "tenant": tenant}
    body = {field: value for field, value in given.items() if value}
    with admin_access(home, url, key).client() as client:
        created = client.call("POST", "/v1/webhooks", json=body)
    console.err().print(f"webhook {created['id']}; its secret will not be shown again:")
    typer.echo(created["secret"])


@app.command("list", epilog="Example:  torchrelay webhook list")
def list_webhooks(
    home: HomeOption = None, url: UrlOption = None, key: AdminKeyOption = None, as_json: JsonOption = False
) -> None:
    """List all webhooks, with the last error of those that refuse events."""
    with admin_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/webhooks")
    if as_json:
        console.print_json(listed)
        return
    if not listed["data"]:
        console.err().print("no webhooks; create one: torchrelay webhook create URL")
        return
    table = ResultTable("id", "url", "tenant", "types", "state", whole=("id",), is_narrow=True)
    for each in listed["data"]:
        state = f"[red]{each['failures']} failures: {each['last_error']}[/]" if each["failures"] else "ok"
        table.add_line(each["id"], each["url"], each["tenant"] or "all", ", ".join(each["types"]), state)
    console.out().print(table)


@app.command(epilog="Example:  torchrelay webhook delete whk-0v3m1c9d7fz8x2kq")
def delete(
    webhook_id: Annotated[str, typer.Argument(metavar="ID", help="As `torchrelay webhook list` shows it.")],
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Delete a webhook; it gets no more events."""
    with admin_access(home, url, key).client() as client:
        client.call("DELETE", f"/v1/webhooks/{quote(webhook_id)}")
    console.err().print(f"deleted {webhook_id}")
