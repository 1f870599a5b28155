"""`torchrelay audit`: the log of changes."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

import typer

from torchrelay.cli.api.access import HomeOption, JsonOption, KeyOption, UrlOption, admin_access
from torchrelay.cli.views import console
from torchrelay.cli.views.console import printable

EXAMPLE = "Example:  torchrelay audit --tenant acme --action key.change"


def audit(
    tenant: Annotated[str | None, typer.Option(help="Changes of this tenant alone.")] = None,
    action: Annotated[str | None, typer.Option(help="One kind of change, such as key.revoke or tenant.change.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="The newest so many.")] = 50,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show changes of keys, tenants, models, prices and operators: who made them, and what was before and after."""
    given = {"tenant": tenant, "action": action, "limit": limit}
    with admin_access(home, url, key).client() as client:
        query = {name: value for name, value in given.items() if value is not None}
        listed = client.call("GET", "/v1/audit", params=query)
    if as_json:
        console.print_json(listed)
        return
    if not listed["data"]:
        console.err().print("no changes")
        return
    for each in reversed(listed["data"]):
        when = datetime.fromisoformat(each["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        line = f"{when}  {each['actor']}  {each['action']} {each['target']}{_difference(each)}"
        console.out().print(printable(line), markup=False, highlight=False, soft_wrap=True)
    if listed["has_more"]:
        console.err().print(f"[dim]older changes: --limit {min(500, 2 * limit)}[/]")


def _difference(change: dict[str, Any]) -> str:
    before, after = change["before"] or {}, change["after"] or {}
    parts = []
    for name in sorted({*before, *after}):
        if change["before"] is not None and change["after"] is not None:
            parts.append(f"{name} {json.dumps(before.get(name))} -> {json.dumps(after.get(name))}")
        elif (value := {**before, **after}[name]) not in (None, False):
            parts.append(f"{name} {json.dumps(value)}")
    return f": {', '.join(parts)}" if parts else ""
