"""`torchrelay models show` and `settings`: what is known of a model, in a line each."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from torchrelay.cli.api.access import HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.commands.prices import PER_MILLION, current_price, price_texts
from torchrelay.cli.views import console
from torchrelay.common.quantities import format_bytes, format_duration


def checked_name(name: str) -> str:
    """An empty name would ask for the list of all models."""
    if not name.strip():
        raise typer.BadParameter("the name is empty; see: torchrelay models")
    return name


_OWN = "TENANT/MODEL, or MODEL if it is your own."
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help=_OWN, callback=checked_name)]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_OWN, callback=checked_name)]
TARGETS = {
    **{f"{name}_ttft_s": f"first token ({name})" for name in ("interactive", "standard", "batch")},
    "tbt_target_s": "between tokens",
}
RESOURCES = ("max_concurrency", "threads", "kv_share", "hosts")
NO_LIMIT = "no limit"


def show(
    name: NameArgument,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's version, size, settings and price."""
    with tenant_access(home, url, key, name).client() as client:
        model = client.call("GET", f"/v1/models/{quote(name)}")
        prices = client.call("GET", "/v1/prices")["data"]
    price = current_price(prices, model["id"], datetime.now(UTC))
    if as_json:
        console.print_json(model | {"price": price})
    else:
        of_prompt, of_cached, of_output = price_texts(price)
        default = " (default)" if price["model"] is None else ""
        cost = f"prompt {of_prompt}, cached {of_cached}, output {of_output}{default}"
        console.out().print(_lines({**_facts(model), **settings_texts(model), f"price, {PER_MILLION}": cost}))


def settings(
    name: NameArgument,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a model scales and what its requests are to attain; `models set` changes it."""
    with tenant_access(home, url, key, name).client() as client:
        model = client.call("GET", f"/v1/models/{quote(name)}")
    if as_json:
        fields = ("idle_timeout_s", "max_instances", "min_instances", "schedule", "engine", *RESOURCES, *TARGETS)
        console.print_json({field: model[field] for field in fields if field in model})
    else:
        console.out().print(_lines(settings_texts(model)))
        console.err().print(f"[dim]to change them: torchrelay models set {name}[/]")


def _facts(model: dict[str, Any]) -> dict[str, str]:
    return {
        "model": model["id"],
        **({"adapter of": model["parent"]} if model.get("parent") else {}),
        "version": model["version"][:12],
        "aliases": ", ".join(model["aliases"]) or "none",
        "architecture": f"{model['architecture']}, {model['dtype']}",
        "size": format_bytes(model["size_bytes"]),
        "context": f"{model['context_length']:,} tokens",
        "published": datetime.fromtimestamp(model["created"]).strftime("%Y-%m-%d %H:%M"),
    }


def settings_texts(model: dict[str, Any]) -> dict[str, str]:
    """Settings in words; defaults of the platform are marked."""
    idle_s = model["effective_idle_timeout_s"]
    idle = f"{idle_s:g} s{'' if model['idle_timeout_s'] else ' (default)'}" if idle_s else "computed"
    most = f"{model['effective_max_instances']} per role{'' if model['max_instances'] else ' (default)'}"
    least = f"{model['min_instances']} per role" if model["min_instances"] else "none: it scales to zero"
    targets = {
        f"target, {what}": format_duration(model[field]) if model[field] else "(default)"
        for field, what in TARGETS.items()
    }
    schedule = "\n".join(model["schedule"]) or "none"
    return {
        "idle timeout": idle,
        "maximum": most,
        "minimum": least,
        "schedule": schedule,
        "engine": model["engine"],
        **resource_texts(model),
        **targets,
    }


def resource_texts(model: dict[str, Any]) -> dict[str, str]:
    """The limits of its requests and instances in words, as far as the gateway knows of it."""
    if "max_concurrency" not in model:  # of an earlier release
        return {}
    requests, threads, share = (model[field] for field in RESOURCES[:3])
    return {
        "requests": f"{requests} at once per instance" if requests else NO_LIMIT,
        "threads": f"{threads} per instance, on a CPU" if threads else NO_LIMIT,
        "share of KV": f"{share:.4g} of an instance's pool" if share < 1 else NO_LIMIT,
        "hosts": f"with {', '.join(model['hosts'])}" if model["hosts"] else "any",
    }


def _lines(texts: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for name, text in texts.items():
        grid.add_row(name, Text(console.printable(text)))
    return grid
