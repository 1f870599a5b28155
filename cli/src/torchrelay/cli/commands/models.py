"""`torchrelay models`: what is published."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from torchrelay.cli import console
from torchrelay.cli.access import HomeOption, JsonOption, KeyOption, UrlOption, tenant_access

EXAMPLE = "Example:  torchrelay models"


def models(home: HomeOption = None, url: UrlOption = None, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """List the models this key may call (with the admin key: all)."""
    with tenant_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/models")
    if as_json:
        console.print_json(listed)
    elif not listed["data"]:
        console.err().print("no models yet; publish one: torchrelay upload DIR")
    else:
        console.out().print(models_table(listed["data"]))


def models_table(models: list[dict[str, Any]]) -> Any:
    numbers = ("size", "context", "idle s", "max")
    made = console.table(
        "model", "version", "architecture", "dtype", "size", "context", "idle s", "max", "published", right=numbers
    )
    for model in models:
        made.add_row(
            model["id"],
            model["version"][:12],
            model["architecture"],
            model["dtype"],
            console.sized(model["size_bytes"]),
            f"{model['context_length']:,}",
            f"{model['idle_timeout_s']:g}" if model.get("idle_timeout_s") else "default",
            str(model["max_instances"]) if model.get("max_instances") else "default",
            datetime.fromtimestamp(model["created"]).strftime("%Y-%m-%d %H:%M"),
        )
    return made
