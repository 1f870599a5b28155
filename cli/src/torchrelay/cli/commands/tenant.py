"""`torchrelay tenant`: tenants, their limits and their service class (admin)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import AdminKeyOption, HomeOption, JsonOption, UrlOption, admin_access
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.commands.limits import (
    BudgetOption,
    ConcurrentOption,
    PeriodOption,
    RequestsOption,
    TokensOption,
    limit,
    limit_fields,
    limits_text,
)
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.console import ResultTable
from torchrelay.common.quantities import format_bytes

app = typer.Typer(no_args_is_help=True, help="Create, change, suspend, delete and list tenants (admin).")


StorageOption = Annotated[
    str | None, typer.Option("--storage-quota-gb", help="Storage for models, in GB; none: no limit.", metavar="GB|none")
]
ClassOption = Annotated[
    Literal["interactive", "standard", "batch", "none"] | None,
    typer.Option(
        help="The most urgent class of its requests, and that of those that name none; none: any, and standard."
    ),
]


def _settings(storage_quota_gb: str | None, service_class: str | None) -> dict[str, int | str | None]:
    """The given options that keys do not have, as fields of the REST API."""
    fields: dict[str, int | str | None] = {}
    if storage_quota_gb is not None:
        number = limit(storage_quota_gb, "--storage-quota-gb")
        fields["storage_quota_bytes"] = None if number is None else round(number * 10**9)
    if service_class is not None:
        fields["service_class"] = None if service_class == "none" else service_class
    return fields


@app.command(epilog="Example:  torchrelay tenant create acme --storage-quota-gb 50 --budget 100")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Also the first part of its models' names.")],
    storage_quota_gb: StorageOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    concurrent_requests: ConcurrentOption = None,
    budget: BudgetOption = None,
    budget_period: PeriodOption = None,
    service_class: ClassOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Create a tenant."""
    limits = limit_fields(requests_per_minute, tokens_per_minute, concurrent_requests, budget, budget_period)
    body = {"name": name, **limits, **_settings(storage_quota_gb, service_class)}
    with admin_access(home, url, key).client() as client:
        created = _create(client, body)
    console.out().print(f"created tenant [bold]{created['name']}[/]")
    console.err().print(f"[dim]next: torchrelay key create --tenant {created['name']}[/]")


@app.command("set", epilog="Example:  torchrelay tenant set acme --budget 200")
def set_tenant(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    storage_quota_gb: StorageOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    concurrent_requests: ConcurrentOption = None,
    budget: BudgetOption = None,
    budget_period: PeriodOption = None,
    service_class: ClassOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Change a tenant's limits or class, from the next request on.

    All keys of the tenant share its limits. A budget without a period covers everything ever spent.
    """
    limits = limit_fields(requests_per_minute, tokens_per_minute, concurrent_requests, budget, budget_period)
    wanted = {**limits, **_settings(storage_quota_gb, service_class)}
    if not wanted:
        raise CliError("nothing to set", "pass --budget or another option; see torchrelay tenant set --help")
    with admin_access(home, url, key).client() as client:
        tenant = client.call("PATCH", f"/v1/tenants/{quote(name)}", json=wanted)
    quota, limits_of_all, served = _settings_texts(tenant)
    console.out().print(f"[bold]{tenant['name']}[/]: storage quota {quota}, {limits_of_all}, service class {served}")


def _create(client: GatewayClient, body: dict[str, Any]) -> dict[str, Any]:
    """The new tenant. Raises ``CliError``; for a taken name the hint is to create a key."""
    try:
        return client.call("POST", "/v1/tenants", json=body)
    except ApiError as error:
        if error.status != 409:
            raise
        raise CliError(error.message, f"create a key for it: torchrelay key create --tenant {body['name']}") from None


@app.command(epilog="Example:  torchrelay tenant suspend acme\n\nBack:     torchrelay tenant suspend acme --resume")
def suspend(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    resume: Annotated[bool, typer.Option("--resume", help="Accept its requests again.")] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Refuse all requests of a tenant, within a second; running ones go on to their end."""
    with admin_access(home, url, key).client() as client:
        client.call("PATCH", f"/v1/tenants/{quote(name)}", json={"suspended": not resume})
    console.out().print(f"{name} is {'active' if resume else 'suspended'}")


@app.command(epilog="Example:  torchrelay tenant delete acme --yes")
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Delete a tenant's keys, models and uploads for ever; its accounts stay, and so does its name."""
    access = admin_access(home, url, key)
    if not yes:
        typer.confirm(f"delete all keys and models of {name}?", abort=True, err=True)
    with access.client() as client:
        deleted = client.call("DELETE", f"/v1/tenants/{quote(name)}")
    console.out().print(f"deleted {name}; kept: {', '.join(deleted['kept'])}")


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
    columns = "tenant", "storage quota", "limits", "class", "created", "state"
    table = ResultTable(
        *columns, right=("storage quota",), whole=("tenant", "class", "created", "state"), is_narrow=True
    )
    for tenant in listed["data"]:
        created = datetime.fromtimestamp(tenant["created"]).strftime("%Y-%m-%d %H:%M")
        state = "[red]deleted[/]" if tenant["deleted"] else "[yellow]suspended[/]" if tenant["suspended"] else "active"
        table.add_line(tenant["name"], *_settings_texts(tenant), created, state)
    console.out().print(table)


def _settings_texts(tenant: dict[str, Any]) -> tuple[str, str, str]:
    """Storage quota, limits and service class."""
    quota = tenant["storage_quota_bytes"]
    quota_text = "no limit" if quota is None else format_bytes(quota)
    return quota_text, limits_text(tenant), tenant.get("service_class") or "any"
