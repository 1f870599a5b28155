"""`torchrelay tenant`: for the admin."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from torchrelay.cli import console
from torchrelay.cli.access import AdminKeyOption, HomeOption, JsonOption, UrlOption, admin_access
from torchrelay.cli.client import Client
from torchrelay.cli.problems import Problem, Refused

NANO = 1_000_000_000
app = typer.Typer(no_args_is_help=True, help="Make and list tenants (admin).")


@app.command(epilog="Example:  torchrelay tenant create acme --storage-quota-gb 50 --budget 100")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Also the first half of its models' names.")],
    storage_quota_gb: Annotated[
        float | None, typer.Option(min=0, help="Room for models, in GB; none: no limit.")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Most it may spend, in dollars; none: no limit.")] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Make a tenant."""
    body: dict[str, str | int] = {"name": name}
    if storage_quota_gb is not None:
        body["storage_quota_bytes"] = round(storage_quota_gb * 1e9)
    if budget is not None:
        body["budget_nano"] = round(budget * NANO)
    with admin_access(home, url, key).client() as client:
        made = _create(client, body)
    console.out().print(f"made tenant [bold]{made['name']}[/]")
    console.err().print(f"[dim]next: torchrelay key create --tenant {made['name']}[/]")


def _create(client: Client, body: dict[str, str | int]) -> dict[str, Any]:
    """The new tenant. Raises ``Problem``, for a taken name with what that tenant can be given."""
    try:
        made: dict[str, Any] = client.call("POST", "/v1/tenants", json=body)
    except Refused as refused:
        if refused.status != 409:
            raise
        raise Problem(refused.message, f"give it a key: torchrelay key create --tenant {body['name']}") from None
    return made


@app.command("list", epilog="Example:  torchrelay tenant list")
def list_tenants(
    home: HomeOption = None, url: UrlOption = None, key: AdminKeyOption = None, as_json: JsonOption = False
) -> None:
    """List all tenants."""
    with admin_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/tenants")
    if as_json:
        console.print_json(listed)
        return
    made = console.table("tenant", "storage quota", "budget", "made", right=("storage quota", "budget"))
    for one in listed["data"]:
        quota, budget = one["storage_quota_bytes"], one["budget_nano"]
        made.add_row(
            one["name"],
            "no limit" if quota is None else console.sized(quota),
            "no limit" if budget is None else f"${budget / NANO:,.2f}",
            datetime.fromtimestamp(one["created"]).strftime("%Y-%m-%d %H:%M"),
        )
    console.out().print(made)
