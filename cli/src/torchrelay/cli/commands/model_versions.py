"""`torchrelay models versions` and `rollback`: the versions that a model had, and the return to them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.api.client import GatewayClient
from torchrelay.cli.commands.model_details import NameArgument
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.console import NARROW_CELLS, ResultTable, WidthAware
from torchrelay.common.quantities import format_bytes

_ID_CELLS = 12  # shown of a version's id


def versions(
    name: NameArgument,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List a model's current version, and the replaced ones to which it can still be rolled back."""
    with tenant_access(home, url, key, name).client() as client:
        listed = _versions(client, name)
    if as_json:
        console.print_json(listed)
    else:
        console.out().print(WidthAware(lambda width: versions_table(listed["data"], width < NARROW_CELLS)))


def versions_table(listed: list[dict[str, Any]], is_small: bool) -> ResultTable:
    columns = ("version", "architecture", "dtype", "size", "state", "kept until")
    hidden = ("architecture",) if is_small else ()
    table = ResultTable(*columns, right=("size",), whole=columns, without=hidden, is_narrow=True)
    for version in listed:
        replaced, until = (_time(version[moment]) for moment in ("replaced", "kept_until"))
        state = f"replaced {replaced}" if replaced else "[green]current[/]"
        size = format_bytes(version["size_bytes"])
        table.add_line(version["id"][:_ID_CELLS], version["architecture"], version["dtype"], size, state, until)
    return table


def rollback(
    name: NameArgument,
    version: Annotated[
        str | None, typer.Argument(metavar="[VERSION]", help="See `models versions`; default: the last replaced.")
    ] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Make a replaced version current again, without an upload; settings stay. Running requests finish on theirs.

    A replaced version is kept for nine minutes by default; the operator sets it with TORCHRELAY_RETIRED_VERSION_S.
    """
    with tenant_access(home, url, key, name).client() as client:
        body = {} if version is None else {"version": _whole_id(_versions(client, name)["data"], version)}
        model = client.call("POST", f"/v1/models/{quote(name)}/rollback", json=body)
    console.out().print(f"[bold]{model['id']}[/]: version {model['version'][:_ID_CELLS]} is current again")


def _versions(client: GatewayClient, name: str) -> dict[str, Any]:
    return client.call("GET", "/v1/versions", params={"model": name})


def _whole_id(listed: list[dict[str, Any]], begin: str) -> str:
    """The id of the replaced version that begins so. Raises ``CliError`` unless there is exactly one."""
    replaced = [str(version["id"]) for version in listed if version["replaced"]]
    fitting = [version_id for version_id in replaced if version_id.startswith(begin)]
    if len(fitting) != 1:
        kept = ", ".join(version_id[:_ID_CELLS] for version_id in replaced) or "none"
        what = "several versions begin" if fitting else "no replaced version begins"
        raise CliError(f"{what} with {begin!r}", f"replaced versions that are kept: {kept}")
    return fitting[0]


def _time(unix_s: int | None) -> str:
    return "" if unix_s is None else datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")
