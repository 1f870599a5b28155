"""`torchrelay key`: a tenant's API keys."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Annotated, Any

import typer

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
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.home import Home
from torchrelay.cli.views import console
from torchrelay.cli.views.console import NARROW_CELLS, ResultTable, WidthAware
from torchrelay.gateway.core import ServiceClassName

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")


@app.command(epilog="Example:  torchrelay key create --tenant acme --name laptop")
def create(
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Owner of the key, created if it does not exist; needs the admin key. Default: the tenant of the "
            "current key (--key, $TORCHRELAY_API_KEY, or the saved one)."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="A label for the key.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Rate limit; none by default.")] = None,
    service_class: Annotated[
        ServiceClassName | None,
        typer.Option(help="How soon requests that name no service_tier are wanted. Default: the tenant's class."),
    ] = None,
    save: Annotated[bool, typer.Option(help="Save it in the local home for the other commands.")] = True,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Create an API key and show it; it cannot be shown again.

    Only the key goes to standard output. On the local platform the admin key is found automatically, and the new key
    is saved for `upload`, `chat` and the other commands.
    """
    access = admin_access(home, url, key) if tenant else tenant_access(home, url, key)
    if tenant is None and access.is_admin:
        raise CliError("with the admin key, --tenant is required", "name the tenant: --tenant NAME")
    wanted = {
        "tenant": tenant,
        "name": name,
        "requests_per_minute": requests_per_minute,
        "service_class": service_class,
    }
    body = {field: value for field, value in wanted.items() if value}
    with access.client() as client:
        # Before the key is made: what fails after that would lose it.
        before = _owner(client, access.home.saved_key()) if access.home and save else ""
        created = _create(client, body)
    console.err().print(f"key {created['id']} of tenant [bold]{created['tenant']}[/]; it will not be shown again:")
    typer.echo(created["key"])
    _keep(access, created, save, before)


def _owner(client: GatewayClient, key: str | None) -> str:
    """The tenant of a key, empty when this caller's list does not have it."""
    listed = client.call("GET", "/v1/keys")["data"] if key else []
    return next((str(each["tenant"]) for each in listed if each["id"] == id_of(key or "")), "")


def _create(client: GatewayClient, body: dict[str, Any]) -> dict[str, Any]:
    """The new key; creates the tenant if it does not exist."""
    try:
        return client.call("POST", "/v1/keys", json=body)
    except ApiError as error:
        if error.status != 404 or "tenant" not in body:
            raise
        client.call("POST", "/v1/tenants", json={"name": body["tenant"]})
        console.err().print(f"created tenant [bold]{body['tenant']}[/]")
        return client.call("POST", "/v1/keys", json=body)


def _keep(access: Access, created: dict[str, Any], save: bool, before: str) -> None:
    """``before``: the tenant of the saved key, empty if it is not known."""
    if access.home is None or not save:
        console.err().print(f"[dim]to use it: export TORCHRELAY_API_URL={access.url} TORCHRELAY_API_KEY=<the key>[/]")
        return
    is_first = access.home.saved_key() is None
    tenant = f"{created['tenant']} (before: {before})" if before else created["tenant"]
    if before:
        access.home.keep_key(access.home.saved_key() or "", before)
    access.home.keep_key(created["key"], created["tenant"])
    access.home.save_key(created["key"])
    if os.environ.get("TORCHRELAY_API_KEY", created["key"]) != created["key"]:
        console.err().print(
            "saved as this home's key, but TORCHRELAY_API_KEY overrides it: unset TORCHRELAY_API_KEY; commands then "
            f"act as tenant {tenant}"
        )
    elif is_first:
        console.err().print("[dim]saved for the other commands; next: torchrelay upload DIR[/]")
    elif before == created["tenant"]:
        console.err().print("saved as this home's key; the previous one stays valid")
    else:
        console.err().print(f"saved as this home's key: commands now act as tenant {tenant}")
        if before:
            console.err().print(f"[dim]back: torchrelay key use {before}[/]")


@app.command("list", epilog="Example:  torchrelay key list")
def list_keys(
    home: HomeOption = None, url: UrlOption = None, key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """List the tenant's keys; with the admin key, all."""
    with tenant_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/keys")
    if as_json:
        console.print_json(listed)
        return
    console.out().print(WidthAware(lambda width: keys_table(listed["data"], width < NARROW_CELLS)))


def keys_table(keys: list[dict[str, Any]], is_small: bool) -> ResultTable:
    columns = ("id", "tenant", "name", "per minute", "class", "created", "state")
    hidden = ("class",) if is_small else ()
    table = ResultTable(*columns, right=("per minute",), names=("tenant", "name"), without=hidden, is_narrow=True)
    for entry in keys:
        limit, state = entry.get("requests_per_minute"), "[red]revoked[/]" if entry.get("revoked") else "active"
        when = datetime.fromtimestamp(entry["created"]).strftime("%Y-%m-%d" if is_small else "%Y-%m-%d %H:%M")
        settings = str(limit or "no limit"), entry.get("service_class") or "tenant's"
        table.add_line(entry["id"], entry["tenant"], entry["name"], *settings, when, state)
    return table


@app.command(epilog="Example:  torchrelay key use acme\n\nList:     torchrelay key use")
def use(
    tenant: Annotated[
        str | None, typer.Argument(metavar="[TENANT]", help="The tenant; without it the kept keys are listed.")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Act as another tenant from now on, with the key of it that this home keeps.

    `key create` keeps each tenant's last key. A command that names a model as TENANT/MODEL uses that tenant's anyway.
    """
    local = Home.at(home)
    kept = local.kept_tenants()
    if tenant is None:
        current = local.tenant_of(local.saved_key() or "")
        for each in kept:
            console.out().print(f"{each} (in use)" if each == current else each)
        if not kept:
            console.err().print("no keys are kept here; create one: torchrelay key create --tenant NAME")
        return
    key = local.kept_key(tenant)
    if key is None:
        names = f"kept: {', '.join(kept)}; " if kept else ""
        raise CliError(f"{local.path} keeps no key of {tenant!r}", f"{names}torchrelay key create --tenant NAME")
    local.save_key(key)
    console.err().print(f"commands now act as tenant [bold]{tenant}[/]")
    if os.environ.get("TORCHRELAY_API_KEY", key) != key:
        console.err().print("but TORCHRELAY_API_KEY overrides it: unset TORCHRELAY_API_KEY")


@app.command(epilog="Example:  torchrelay key revoke 8x2kq0v3m1c9d7fz")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id (see `key list`), or the whole key.")],
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Revoke a key; it stops working within a second."""
    access = admin_access(home, url, key)
    key_id = id_of(key_id)
    with access.client() as client:
        client.call("DELETE", f"/v1/keys/{key_id}")
    if access.home:
        access.home.forget_key(key_id)
    console.err().print(f"revoked {key_id}")


def id_of(key: str) -> str:
    """The id inside ``tr-<id>-<secret>``; anything else is taken as an id."""
    parts = key.split("-")
    return parts[1] if len(parts) == 3 and parts[0] == "tr" else key
