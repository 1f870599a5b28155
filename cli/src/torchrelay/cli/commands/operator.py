"""`torchrelay operator`: the people who run the platform."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import AdminKeyOption, HomeOption, JsonOption, UrlOption, admin_access
from torchrelay.cli.views import console
from torchrelay.cli.views.console import ResultTable
from torchrelay.gateway.core import Role

app = typer.Typer(no_args_is_help=True, help="Create, change, list and revoke operators (admin).")
NameArgument = Annotated[str, typer.Argument(metavar="NAME")]
RoleOption = Annotated[
    Role,
    typer.Option(
        help="viewer: reads everything; operator: also manages tenants, keys and models; admin: also operators, "
        "prices, invoices and the deletion of tenants."
    ),
]


@app.command(epilog="Example:  torchrelay operator create ann --role operator")
def create(
    name: NameArgument, role: RoleOption, home: HomeOption = None, url: UrlOption = None, key: AdminKeyOption = None
) -> None:
    """Create an operator and show the key; it cannot be shown again.

    Only the key goes to standard output.
    """
    with admin_access(home, url, key).client() as client:
        created = client.call("POST", "/v1/operators", json={"name": name, "role": role})
    console.err().print(f"{role} [bold]{created['name']}[/]; the key will not be shown again:")
    typer.echo(created["key"])


@app.command("set", epilog="Example:  torchrelay operator set ann --role viewer")
def set_operator(
    name: NameArgument, role: RoleOption, home: HomeOption = None, url: UrlOption = None, key: AdminKeyOption = None
) -> None:
    """Give an operator another role, within a second."""
    with admin_access(home, url, key).client() as client:
        changed = client.call("PATCH", f"/v1/operators/{quote(name)}", json={"role": role})
    console.out().print(f"[bold]{changed['name']}[/]: {changed['role']}")


@app.command("list", epilog="Example:  torchrelay operator list")
def list_operators(
    home: HomeOption = None, url: UrlOption = None, key: AdminKeyOption = None, as_json: JsonOption = False
) -> None:
    """List all operators."""
    with admin_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/operators")
    if as_json:
        console.print_json(listed)
        return
    if not listed["data"]:
        console.err().print("no operators; create one: torchrelay operator create NAME --role ROLE")
        return
    table = ResultTable("name", "role", "created", "state", names=("name",), is_narrow=True)
    for each in listed["data"]:
        created = datetime.fromtimestamp(each["created"]).strftime("%Y-%m-%d %H:%M")
        table.add_line(each["name"], each["role"], created, "[red]revoked[/]" if each["revoked"] else "active")
    console.out().print(table)


@app.command(epilog="Example:  torchrelay operator revoke ann")
def revoke(name: NameArgument, home: HomeOption = None, url: UrlOption = None, key: AdminKeyOption = None) -> None:
    """Revoke an operator's key; it stops working within a second."""
    with admin_access(home, url, key).client() as client:
        client.call("DELETE", f"/v1/operators/{quote(name)}")
    console.err().print(f"revoked {name}")
