"""`torchrelay key`: a tenant's API keys."""

from __future__ import annotations

import os
from datetime import UTC, datetime
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
from torchrelay.cli.commands.limits import (
    BudgetOption,
    ConcurrentOption,
    PeriodOption,
    RequestsOption,
    TokensOption,
    budget_text,
    limit_fields,
    limits_text,
)
from torchrelay.cli.errors import ApiError, CliError
from torchrelay.cli.home import Home
from torchrelay.cli.views import console
from torchrelay.cli.views.console import NARROW_CELLS, ResultTable, WidthAware
from torchrelay.gateway.core import ServiceClassName

app = typer.Typer(no_args_is_help=True, help="Create, change, rotate, list and revoke API keys.")

KeyIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The key's id (see `key list`), or the whole key.")]
ModelOption = Annotated[
    list[str] | None,
    typer.Option("--model", help="A model that the key may call; repeat for more; none: all of the tenant."),
]
ExpiresOption = Annotated[
    str | None, typer.Option("--expires", help="When it ends: 2027-01-31, an ISO 8601 time; none: never.")
]
ManagesOption = Annotated[
    bool | None,
    typer.Option(
        "--manages-keys/--no-manages-keys",
        help="Whether it may manage keys. Default: yes, unless it has limits or models of its own.",
    ),
]


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
    model: ModelOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    concurrent_requests: ConcurrentOption = None,
    budget: BudgetOption = None,
    budget_period: PeriodOption = None,
    expires: ExpiresOption = None,
    manages_keys: ManagesOption = None,
    service_class: Annotated[
        ServiceClassName | None,
        typer.Option(help="The most urgent class of its requests, and the default. Default: the tenant's class."),
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
    limits = limit_fields(requests_per_minute, tokens_per_minute, concurrent_requests, budget, budget_period)
    wanted = {"tenant": tenant, "name": name, "service_class": service_class, **_access(model, expires, manages_keys)}
    body = {field: value for field, value in {**wanted, **limits}.items() if value is not None and value != ""}
    with access.client() as client:
        # Before the key is made: what fails after that would lose it.
        before = _owner(client, access.home.saved_key()) if access.home and save else ""
        created = _create(client, body)
    console.err().print(f"key {created['id']} of tenant [bold]{created['tenant']}[/]; it will not be shown again:")
    typer.echo(created["key"])
    _keep(access, created, save, before)


@app.command("set", epilog="Example:  torchrelay key set 8x2kq0v3m1c9d7fz --budget 5 --budget-period day")
def set_key(
    key_id: KeyIdArgument,
    name: Annotated[str | None, typer.Option(help="A label for the key.")] = None,
    model: ModelOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    concurrent_requests: ConcurrentOption = None,
    budget: BudgetOption = None,
    budget_period: PeriodOption = None,
    expires: ExpiresOption = None,
    manages_keys: ManagesOption = None,
    pause: Annotated[
        bool | None, typer.Option("--pause/--resume", help="Refuse its requests, or accept them again.")
    ] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Change a key; within a second the change applies to its requests."""
    wanted: dict[str, Any] = {
        **limit_fields(requests_per_minute, tokens_per_minute, concurrent_requests, budget, budget_period),
        **_access(model, expires, manages_keys),
        **({} if name is None else {"name": name}),
        **({} if pause is None else {"paused": pause}),
    }
    if not wanted:
        raise CliError("nothing to set", "pass an option, such as --pause; see torchrelay key set --help")
    with admin_access(home, url, key).client() as client:
        changed = client.call("PATCH", f"/v1/keys/{id_of(key_id)}", json=wanted)
    console.out().print(f"[bold]{changed['id']}[/] of tenant {changed['tenant']}: {_settings_text(changed)}")


@app.command(epilog="Example:  torchrelay key rotate 8x2kq0v3m1c9d7fz --overlap 2h")
def rotate(
    key_id: KeyIdArgument,
    overlap: Annotated[
        str, typer.Option(help="How long the old secret stays valid: 30m, 2h, 1d; 0s: not at all.")
    ] = "1d",
    home: HomeOption = None,
    url: UrlOption = None,
    key: AdminKeyOption = None,
) -> None:
    """Give a key another secret and show it; id, limits and usage stay.

    Only the key goes to standard output. A key that this home has saved is replaced there.
    """
    from torchrelay.cli.views.event_lines import parse_duration

    try:
        overlap_s = parse_duration(overlap).total_seconds()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--overlap") from error
    access = admin_access(home, url, key)
    with access.client() as client:
        rotated = client.call("POST", f"/v1/keys/{id_of(key_id)}/rotate", json={"overlap_s": overlap_s})
    console.err().print(f"key {rotated['id']} of tenant [bold]{rotated['tenant']}[/]; it will not be shown again:")
    typer.echo(rotated["key"])
    console.err().print(f"[dim]the old one is valid until {rotated['previous_valid_until']}[/]")
    if access.home and id_of(access.home.kept_key(rotated["tenant"]) or "") == rotated["id"]:
        access.home.keep_key(rotated["key"], rotated["tenant"])
    if access.home and id_of(access.home.saved_key() or "") == rotated["id"]:
        access.home.save_key(rotated["key"])


@app.command(epilog="Example:  torchrelay key show")
def show(home: HomeOption = None, url: UrlOption = None, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Show the current key: its limits, and what is left of them."""
    with tenant_access(home, url, key).client() as client:
        mine = client.call("GET", "/v1/keys/me")
    if as_json or mine["tenant"] is None:
        console.print_json(mine)
        return
    console.out().print(f"key [bold]{mine['id']}[/] of tenant [bold]{mine['tenant']}[/]: {_settings_text(mine)}")
    for whose, of in (("key", mine), ("tenant", mine["limits_of_tenant"])):
        for line in _left(of):
            console.out().print(f"{whose}: {line}")


def _left(of: dict[str, Any]) -> list[str]:
    """A line for each limit of a key or tenant, with the rest of it."""
    from torchrelay.gateway.billing.money import dollars  # imports gRPC: not for `torchrelay --help`

    lines = []
    if of["requests_per_minute"] is not None:
        lines.append(f"{of['requests_left']:,} of {of['requests_per_minute']:,} requests per minute are left")
    if of["tokens_per_minute"] is not None:
        lines.append(f"{of['tokens_left']:,} of {of['tokens_per_minute']:,} tokens per minute are left")
    if of["concurrent_requests"] is not None:
        lines.append(f"{of['requests_running']:,} of {of['concurrent_requests']:,} requests at once are running")
    if of["budget_nano"] is not None:
        until = f", until {of['period_end']}" if "period_end" in of else ""
        spent = f"{dollars(of['spent_nano'])} spent, {dollars(of['reserved_nano'])} reserved"
        lines.append(f"{dollars(of['left_nano'])} of {budget_text(of)} are left ({spent}){until}")
    return lines


def _access(models: list[str] | None, expires: str | None, manages_keys: bool | None) -> dict[str, Any]:
    """The given options about models, expiry and keys, as fields of the REST API."""
    fields: dict[str, Any] = {}
    if models is not None:
        fields["models"] = None if models == ["none"] else models
    if expires is not None:
        fields["expires_at"] = None if expires == "none" else expires
    if manages_keys is not None:
        fields["may_manage_keys"] = manages_keys
    return fields


def _settings_text(key: dict[str, Any]) -> str:
    texts = [limits_text(key)]
    if key["models"] is not None:
        texts.append(f"models {', '.join(key['models'])}")
    if key["expires_at"]:
        texts.append(f"expires {key['expires_at']}")
    texts += [] if key["may_manage_keys"] else ["may not manage keys"]
    return ", ".join([*texts, _state(key)])


def _state(key: dict[str, Any]) -> str:
    if key.get("revoked"):
        return "[red]revoked[/]"
    if key.get("paused"):
        return "[yellow]paused[/]"
    expires = key.get("expires_at")
    is_over = expires is not None and datetime.fromisoformat(expires) <= datetime.now(UTC)
    return "[red]expired[/]" if is_over else "active"


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
    columns = ("id", "tenant", "name", "limits", "class", "created", "last used", "state")
    hidden = ("class", "last used") if is_small else ()
    table = ResultTable(*columns, names=("tenant", "name", "limits"), without=hidden, is_narrow=True)
    for entry in keys:
        when = datetime.fromtimestamp(entry["created"]).strftime("%Y-%m-%d")
        used = entry.get("last_used_at")
        last = datetime.fromisoformat(used).astimezone().strftime("%Y-%m-%d %H:%M") if used else "never"
        settings = limits_text(entry), entry.get("service_class") or "tenant's"
        table.add_line(entry["id"], entry["tenant"], entry["name"], *settings, when, last, _state(entry))
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
    key_id: KeyIdArgument,
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
