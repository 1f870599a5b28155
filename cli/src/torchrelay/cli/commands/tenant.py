"""`torchrelay tenant`: for the admin."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import AdminKeyOption, HomeOption, JsonOption, UrlOption, admin_access
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.views import console
from torchrelay.common.sizes import format_bytes

NANO = 1_000_000_000
app = typer.Typer(no_args_is_help=True, help="Make, change and list tenants (admin).")


def _limit(text: str) -> float | None:
    """A number from 0; ``none``: no limit."""
    if text == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise typer.BadParameter(f"{text!r} is neither a number from 0 nor none")
    return number


StorageOption = Annotated[
    str | None, typer.Option("--storage-quota-gb", help="Room for models, in GB; none: no limit.", metavar="GB|none")
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", help="Most it may spend, in dollars; none: no limit.", metavar="DOLLARS|none")
]


def _limits(storage_quota_gb: str | None, budget: str | None) -> dict[str, int | None]:
    """The limits that were given, as the REST door takes them."""
    given = {"storage_quota_bytes": (storage_quota_gb, 10**9), "budget_nano": (budget, NANO)}
    read = {field: (_limit(text), unit) for field, (text, unit) in given.items() if text is not None}
    return {field: None if number is None else round(number * unit) for field, (number, unit) in read.items()}


@app.command(epilog="Example:  torchrelay tenant create acme --storage-quota-gb 50 --budget 100")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Also the first half of its models' names.")],
    storage_quota_gb: StorageOption = None,
    budget: BudgetOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Make a tenant."""
    body = {"name": name, **_limits(storage_quota_gb, budget)}
    with admin_access(home, url, key).client() as client:
        made = _create(client, body)
    console.out().print(f"made tenant [bold]{made['name']}[/]")
    console.err().print(f"[dim]next: torchrelay key create --tenant {made['name']}[/]")


@app.command("set", epilog="Example:  torchrelay tenant set acme --budget 200")
def set_tenant(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    storage_quota_gb: StorageOption = None,
    budget: BudgetOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Change a tenant's limits; a budget counts all it ever spent, and a changed one holds for the next request."""
    wanted = _limits(storage_quota_gb, budget)
    if not wanted:
        raise CliError("there is nothing to set", "give --budget or --storage-quota-gb")
    with admin_access(home, url, key).client() as client:
        one = client.call("PATCH", f"/v1/tenants/{quote(name)}", json=wanted)
    quota, most = _shown(one)
    console.out().print(f"[bold]{one['name']}[/]: storage quota {quota}, budget {most}")


def _create(client: GatewayClient, body: dict[str, Any]) -> dict[str, Any]:
    """The new tenant. Raises ``Problem``, for a taken name with what that tenant can be given."""
    try:
        made: dict[str, Any] = client.call("POST", "/v1/tenants", json=body)
    except ApiError as refused:
        if refused.status != 409:
            raise
        raise CliError(refused.message, f"give it a key: torchrelay key create --tenant {body['name']}") from None
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
        made.add_row(
            one["name"],
            *_shown(one),
            datetime.fromtimestamp(one["created"]).strftime("%Y-%m-%d %H:%M"),
        )
    console.out().print(made)


def _shown(one: dict[str, Any]) -> tuple[str, str]:
    """Storage quota and budget."""
    from torchrelay.gateway.billing.money import dollars  # imports gRPC: not for `torchrelay --help`

    quota, budget = one["storage_quota_bytes"], one["budget_nano"]
    return (
        "no limit" if quota is None else format_bytes(quota),
        "no limit" if budget is None else dollars(budget),
    )
