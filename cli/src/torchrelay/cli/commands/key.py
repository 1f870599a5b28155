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
from torchrelay.cli.views import console

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")


@app.command(epilog="Example:  torchrelay key create --tenant acme --name laptop")
def create(
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Whose key; made when there is no such tenant. Needs the admin key. By default the tenant of the "
            "key at hand: --key, $TORCHRELAY_API_KEY, or the one saved here."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="A label to know the key by.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Rate limit; none by default.")] = None,
    save: Annotated[bool, typer.Option(help="Keep it in the local home, for the other commands.")] = True,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Make an API key and show it: the only time it can be seen.

    The key alone goes to standard output. On the local platform the admin key is found by itself, and the new key is
    kept for `upload`, `chat` and the others.
    """
    access = admin_access(home, url, key) if tenant else tenant_access(home, url, key)
    if tenant is None and access.is_admin:
        raise CliError("the admin key must say whose key this will be", "name the tenant: --tenant NAME")
    wanted = {"tenant": tenant, "name": name, "requests_per_minute": requests_per_minute}
    body = {field: value for field, value in wanted.items() if value}
    with access.client() as client:
        made = _create(client, body)
    console.err().print(f"key {made['id']} of tenant [bold]{made['tenant']}[/]; it is not shown again:")
    typer.echo(made["key"])
    _keep(access, made, save)


def _create(client: GatewayClient, body: dict[str, Any]) -> dict[str, Any]:
    """The new key; an unknown tenant is made on the way."""
    made: dict[str, Any]
    try:
        made = client.call("POST", "/v1/keys", json=body)
    except ApiError as refused:
        if refused.status != 404 or "tenant" not in body:
            raise
        client.call("POST", "/v1/tenants", json={"name": body["tenant"]})
        console.err().print(f"made tenant [bold]{body['tenant']}[/]")
        made = client.call("POST", "/v1/keys", json=body)
    return made


def _keep(access: Access, made: dict[str, Any], save: bool) -> None:
    if access.home is None or not save:
        console.err().print(f"[dim]use it: export TORCHRELAY_API_URL={access.url} TORCHRELAY_API_KEY=<the key>[/]")
        return
    is_first = access.home.saved_key() is None
    access.home.save_key(made["key"])
    if os.environ.get("TORCHRELAY_API_KEY", made["key"]) != made["key"]:
        console.err().print("saved as this home's key; TORCHRELAY_API_KEY counts before it: unset TORCHRELAY_API_KEY")
    elif is_first:
        console.err().print("[dim]saved for the other commands here; next: torchrelay upload DIR[/]")
    else:
        console.err().print("saved as this home's key; the earlier one stays valid")


@app.command("list", epilog="Example:  torchrelay key list")
def list_keys(
    home: HomeOption = None, url: UrlOption = None, key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """List keys: those of the tenant, or with the admin key all."""
    with tenant_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/keys")
    if as_json:
        console.print_json(listed)
        return
    made = console.table("id", "tenant", "name", "per minute", "made", "state", right=("per minute",))
    for one in listed["data"]:
        limit, state = one.get("requests_per_minute"), "[red]revoked[/]" if one.get("revoked") else "good"
        when = datetime.fromtimestamp(one["created"]).strftime("%Y-%m-%d %H:%M")
        made.add_row(one["id"], one["tenant"], one["name"], str(limit or "no limit"), when, state)
    console.out().print(made)


@app.command(epilog="Example:  torchrelay key revoke 8x2kq0v3m1c9d7fz")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id (see `key list`), or the whole key.")],
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Revoke a key: within a second nobody can use it any more."""
    access = admin_access(home, url, key)
    key_id = id_of(key_id)
    with access.client() as client:
        client.call("DELETE", f"/v1/keys/{key_id}")
    saved = access.home.saved_key() if access.home else None
    if access.home and saved and id_of(saved) == key_id:
        access.home.forget_key()
    console.err().print(f"revoked {key_id}")


def id_of(key: str) -> str:
    """The id inside ``tr-<id>-<secret>``; anything else is taken for an id."""
    parts = key.split("-")
    return parts[1] if len(parts) == 3 and parts[0] == "tr" else key
