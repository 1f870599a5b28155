"""`torchrelay tenant`: tenants, their limits and their service class (admin)."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import AdminKeyOption, HomeOption, JsonOption, UrlOption, admin_access
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.console import ResultTable
from torchrelay.common.quantities import format_bytes

NANO = 1_000_000_000
app = typer.Typer(no_args_is_help=True, help="Create, change and list tenants (admin).")


def _limit(text: str, option: str) -> float | None:
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


StorageOption = Annotated[
    str | None, typer.Option("--storage-quota-gb", help="Storage for models, in GB; none: no limit.", metavar="GB|none")
]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", help="Maximum spending, in dollars; none: no limit.", metavar="DOLLARS|none")
]
ClassOption = Annotated[
    Literal["interactive", "standard", "batch", "none"] | None,
    typer.Option(help="How soon requests are wanted if neither they nor their key say; none: standard."),
]


def _settings(
    storage_quota_gb: str | None, budget: str | None, service_class: str | None
) -> dict[str, int | str | None]:
    """The given options as fields of the REST API."""
    given = {
        "storage_quota_bytes": ("--storage-quota-gb", storage_quota_gb, 10**9),
        "budget_nano": ("--budget", budget, NANO),
    }
    read = {field: (_limit(text, option), unit) for field, (option, text, unit) in given.items() if text is not None}
    limits = {field: None if number is None else round(number * unit) for field, (number, unit) in read.items()}
    classes = {} if service_class is None else {"service_class": None if service_class == "none" else service_class}
    return {**limits, **classes}


@app.command(epilog="Example:  torchrelay tenant create acme --storage-quota-gb 50 --budget 100")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Also the first part of its models' names.")],
    storage_quota_gb: StorageOption = None,
    budget: BudgetOption = None,
    service_class: ClassOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Create a tenant."""
    body = {"name": name, **_settings(storage_quota_gb, budget, service_class)}
    with admin_access(home, url, key).client() as client:
        created = _create(client, body)
    console.out().print(f"created tenant [bold]{created['name']}[/]")
    console.err().print(f"[dim]next: torchrelay key create --tenant {created['name']}[/]")


@app.command("set", epilog="Example:  torchrelay tenant set acme --budget 200")
def set_tenant(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    storage_quota_gb: StorageOption = None,
    budget: BudgetOption = None,
    service_class: ClassOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Change a tenant's limits or class, from the next request on; a budget covers everything ever spent."""
    wanted = _settings(storage_quota_gb, budget, service_class)
    if not wanted:
        raise CliError("nothing to set", "pass --budget, --storage-quota-gb or --service-class")
    with admin_access(home, url, key).client() as client:
        tenant = client.call("PATCH", f"/v1/tenants/{quote(name)}", json=wanted)
    quota, most, served = _settings_texts(tenant)
    console.out().print(f"[bold]{tenant['name']}[/]: storage quota {quota}, budget {most}, service class {served}")


def _create(client: GatewayClient, body: dict[str, Any]) -> dict[str, Any]:
    """The new tenant. Raises ``CliError``; for a taken name the hint is to create a key."""
    try:
        return client.call("POST", "/v1/tenants", json=body)
    except ApiError as error:
        if error.status != 409:
            raise
        raise CliError(error.message, f"create a key for it: torchrelay key create --tenant {body['name']}") from None


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
    columns, numbers = ("tenant", "storage quota", "budget", "class", "created"), ("storage quota", "budget")
    table = ResultTable(*columns, right=numbers, names=("tenant",), is_narrow=True)
    for tenant in listed["data"]:
        created = datetime.fromtimestamp(tenant["created"]).strftime("%Y-%m-%d %H:%M")
        table.add_line(tenant["name"], *_settings_texts(tenant), created)
    console.out().print(table)


def _settings_texts(tenant: dict[str, Any]) -> tuple[str, str, str]:
    """Storage quota, budget and service class."""
    from torchrelay.gateway.billing.money import dollars  # imports gRPC: not for `torchrelay --help`

    quota, budget = tenant["storage_quota_bytes"], tenant["budget_nano"]
    quota_text = "no limit" if quota is None else format_bytes(quota)
    return quota_text, "no limit" if budget is None else dollars(budget), tenant.get("service_class") or "standard"
