"""`torchrelay models`: list, show, configure, name and delete models."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group
from rich.text import Text

from torchrelay.cli.api.access import (
    BatchTtftOption,
    EngineOption,
    HomeOption,
    HostsOption,
    IdleTimeoutOption,
    InteractiveTtftOption,
    JsonOption,
    KeyOption,
    KvShareOption,
    MaxConcurrencyOption,
    MaxInstancesOption,
    MinInstancesOption,
    ScheduleOption,
    StandardTtftOption,
    TbtTargetOption,
    ThreadsOption,
    UrlOption,
    admin_access,
    tenant_access,
)
from torchrelay.cli.api.client import given
from torchrelay.cli.command_group import has_subcommand
from torchrelay.cli.commands import model_details, model_versions
from torchrelay.cli.commands.model_details import NO_LIMIT, TARGETS, NameArgument, resource_texts
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.console import NARROW_CELLS, ResultTable, WidthAware
from torchrelay.common.quantities import format_bytes, format_duration

SCHEDULE_EXAMPLE = "mon-fri 08:00-18:00 Europe/Berlin = 2"
EXAMPLE = "Example:  torchrelay models\n\nTo zero sooner:  torchrelay models set glossary --idle-timeout-s 30"
app = typer.Typer(invoke_without_command=True)
app.command(epilog="Example:  torchrelay models show glossary")(model_details.show)
app.command(epilog="Example:  torchrelay models settings glossary")(model_details.settings)
app.command(epilog="Example:  torchrelay models versions glossary")(model_versions.versions)
app.command(
    epilog="Example:  torchrelay models rollback glossary\n\nTo one:   torchrelay models rollback glossary f3195738713d"
)(model_versions.rollback)


@app.callback()
def models(
    context: typer.Context,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the models this key may call (all, with the admin key); configure or delete one."""
    if has_subcommand(context):
        return
    with tenant_access(home, url, key).client() as client:
        listed = client.call("GET", "/v1/models")
    if as_json:
        console.print_json(listed)
    elif not listed["data"]:
        console.err().print("no models yet; publish one: torchrelay upload DIR")
    else:
        console.out().print(models_table([model for model in listed["data"] if "alias_of" not in model]))


def models_table(models: list[dict[str, Any]]) -> WidthAware:
    """A row per model, fewer columns on a narrow terminal; below it schedules of minimums, and targets."""
    lines = [Text(f"{model['id']}: {line}", overflow="fold") for model in models for line in _more_settings(model)]
    return WidthAware(lambda width: Group(_table(models, is_small=width < NARROW_CELLS), *lines))


def _more_settings(model: dict[str, Any]) -> list[str]:
    """Lines for settings that few models have: each entry of a schedule, and the targets."""
    firsts = [
        f"{format_duration(seconds)} ({name})"
        for name in ("interactive", "standard", "batch")
        if (seconds := model.get(f"{name}_ttft_s"))
    ]
    targets = [f"first token in {', '.join(firsts)}"] if firsts else []
    if between_s := model.get("tbt_target_s"):
        targets.append(f"{format_duration(between_s)} between tokens")
    schedule = [f"min {entry}" for entry in model.get("schedule", ())]
    base = [f"adapter of {model['parent']}"] if model.get("parent") else []
    aliases = [f"also {', '.join(model['aliases'])}"] if model.get("aliases") else []
    engine = [f"engine {model['engine']}"] if model.get("engine", "auto") != "auto" else []
    resources = [f"{what} {text}" for what, text in resource_texts(model).items() if text not in (NO_LIMIT, "any")]
    return [*base, *aliases, *engine, *resources, *schedule, *([f"targets: {'; '.join(targets)}"] if targets else [])]


def _table(models: list[dict[str, Any]], is_small: bool) -> ResultTable:
    numbers = ("size", "context", "idle s", "max", "min")
    columns = ("model", "version", "architecture", "dtype", *numbers, "published")
    hidden = ("version", "architecture", "dtype", "context") if is_small else ()
    table = ResultTable(*columns, right=numbers, names=("model",), without=hidden, is_narrow=True)
    for model in models:
        table.add_line(
            model["id"],
            model["version"][:12],
            model["architecture"],
            model["dtype"],
            format_bytes(model["size_bytes"]),
            f"{model['context_length']:,}",
            *_scaling(model),
            str(model.get("min_instances", 0)),
            datetime.fromtimestamp(model["created"]).strftime("%Y-%m-%d" if is_small else "%Y-%m-%d %H:%M"),
        )
    return table


def _scaling(model: dict[str, Any]) -> tuple[str, str]:
    """Idle timeout and maximum instances; marked if they are the platform's defaults."""
    idle_s, most = model["effective_idle_timeout_s"], model["effective_max_instances"]
    return (
        f"{idle_s:g}{'' if model['idle_timeout_s'] else ' (default)'}" if idle_s else "computed",
        f"{most}" if model["max_instances"] else f"{most} (default)",
    )


@app.command(
    "set",
    epilog="Example:  torchrelay models set glossary --idle-timeout-s 30\n\n"
    f"At times: torchrelay models set acme/glossary --schedule '{SCHEDULE_EXAMPLE}'\n\n"
    "Targets:  torchrelay models set acme/glossary --standard-ttft-s 0.5 --tbt-target-s 0.05\n\n"
    "Limits:   torchrelay models set acme/glossary --max-concurrency 8 --threads 4 --kv-share 0.5 --hosts zone=a",
)
def set_model(
    name: NameArgument,
    idle_timeout_s: IdleTimeoutOption = None,
    max_instances: MaxInstancesOption = None,
    engine: EngineOption = None,
    max_concurrency: MaxConcurrencyOption = None,
    threads: ThreadsOption = None,
    kv_share: KvShareOption = None,
    hosts: HostsOption = None,
    min_instances: MinInstancesOption = None,
    schedule: ScheduleOption = None,
    interactive_ttft_s: InteractiveTtftOption = None,
    standard_ttft_s: StandardTtftOption = None,
    batch_ttft_s: BatchTtftOption = None,
    tbt_target_s: TbtTargetOption = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Change how a model scales, and what its requests are to attain; its version stays the same.

    Running instances adopt the change with the model's next request, minimums within seconds, threads when they are
    loaded next. A minimum at times is as large as the greatest that is in force, loaded by its begin; an end before
    the begin is of the next day.

    For options marked admin the local platform's admin key is found automatically; NAME is then TENANT/MODEL.
    """
    own = given(idle_timeout_s=idle_timeout_s, max_instances=max_instances, engine=engine)
    operators = given(
        max_concurrency=max_concurrency,
        threads=threads,
        kv_share=kv_share,
        hosts=_entries(hosts, "hosts"),
        min_instances=min_instances,
        schedule=_entries(schedule or None, "schedule"),
        interactive_ttft_s=interactive_ttft_s,
        standard_ttft_s=standard_ttft_s,
        batch_ttft_s=batch_ttft_s,
        tbt_target_s=tbt_target_s,
    )
    if not (own or operators):
        raise CliError("nothing to set", "pass one of the options: torchrelay models set --help")
    access = admin_access(home, url, key) if operators else tenant_access(home, url, key, name)
    for field in operators:
        access.require_admin(f"--{field.replace('_', '-')}")
    with access.client() as client:
        model = client.call("PATCH", f"/v1/models/{quote(name)}", json=own | operators)
    idle_s, most = _scaling(model)
    least = f", min {model['min_instances']}" if model.get("min_instances") else ""
    console.out().print(f"[bold]{model['id']}[/]: idle s {idle_s}, max instances per role {most}{least}")
    for line in _more_settings(model):
        console.out().print(f"[bold]{model['id']}[/]: {line}")
    if defaults := [what for field, what in TARGETS.items() if operators.get(field) == 0]:
        console.out().print(f"[bold]{model['id']}[/]: back to the platform's default targets: {', '.join(defaults)}")
    adopted = "within seconds" if schedule or min_instances is not None else "with the model's next request"
    if threads is not None:
        adopted += ", and the threads when they are loaded next"
    console.err().print(f"[dim]running instances adopt it {adopted}[/]")


@app.command(
    epilog="Example:  torchrelay models alias glossary claude-sonnet-4-5\n\nNone:  torchrelay models alias glossary"
)
def alias(
    name: NameArgument,
    aliases: Annotated[
        list[str] | None, typer.Argument(metavar="[ALIAS]...", help="All its aliases; without any it has none.")
    ] = None,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Set the further names under which its tenant may call a model; usage and bills name the model."""
    with tenant_access(home, url, key, name).client() as client:
        model = client.call("PUT", f"/v1/models/{quote(name)}/aliases", json={"aliases": aliases or []})
    listed = ", ".join(model["aliases"]) or "none"
    console.out().print(f"[bold]{model['id']}[/]: aliases {listed}")


def _entries(given_entries: list[str] | None, option: str) -> list[str] | None:
    """The entries of an option: none for ``none``."""
    if given_entries and "none" in given_entries:
        if len(given_entries) > 1:
            raise CliError(f"--{option}: none beside an entry", f"pass --{option} none alone to clear it")
        return []
    return given_entries


@app.command(epilog="Example:  torchrelay models delete glossary")
def delete(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; required without a terminal.")] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Remove a model from the catalog; running requests finish, new ones are rejected. Its usage stays billed."""
    if not yes:
        if not sys.stdin.isatty():
            raise CliError(f"cannot ask whether to delete {name}: there is no terminal", "pass --yes to delete it")
        if not typer.confirm(f"delete {name}?", err=True):
            raise typer.Exit(1)
    with tenant_access(home, url, key, name).client() as client:
        deleted = client.call("DELETE", f"/v1/models/{quote(name)}")
    console.out().print(f"deleted {deleted['id']}")
    console.err().print("[dim]`torchrelay top` shows its copies until they are freed, ten minutes later by default[/]")
