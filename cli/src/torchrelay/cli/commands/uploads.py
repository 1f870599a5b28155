"""`torchrelay uploads`: list and abort uploads that are open."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.command_group import has_subcommand
from torchrelay.cli.views import console
from torchrelay.cli.views.console import NARROW_CELLS, ResultTable, WidthAware
from torchrelay.common.quantities import format_bytes

EXAMPLE = "Example:  torchrelay uploads\n\nTo free one:  torchrelay uploads abort ID"
app = typer.Typer(invoke_without_command=True)


@app.callback()
def uploads(
    context: typer.Context,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the open uploads of this key's tenant (all, with the admin key); abort one.

    An open upload counts in the storage quota until it is published, aborted or expires.
    """
    if has_subcommand(context):
        return
    with tenant_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/uploads")
    if as_json:
        console.print_json(listed)
        return
    if not listed["data"]:
        console.err().print("no open uploads")
        return
    console.out().print(WidthAware(lambda width: uploads_table(listed["data"], width < NARROW_CELLS)))


def uploads_table(listed: list[dict[str, Any]], is_small: bool) -> ResultTable:
    columns, hidden = ("upload", "model", "size", "begun", "expires"), ("begun",) if is_small else ()
    table = ResultTable(*columns, right=("size",), names=("model",), without=hidden, is_narrow=True)
    for upload in listed:
        times = (datetime.fromtimestamp(upload[moment]).strftime("%Y-%m-%d %H:%M") for moment in ("created", "expires"))
        table.add_line(upload["id"], upload["model"], format_bytes(upload["size_bytes"]), *times)
    return table


@app.command(epilog="Example:  torchrelay uploads abort upl-0v3m1c9d7fz8x2kq")
def abort(
    upload_id: Annotated[str, typer.Argument(metavar="ID", help="As `torchrelay uploads` lists it.")],
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """End an upload and free what was sent."""
    with tenant_access(home, url, key).client() as client:
        client.call("DELETE", f"/v1/uploads/{quote(upload_id)}")
    console.out().print(f"aborted {upload_id}")
