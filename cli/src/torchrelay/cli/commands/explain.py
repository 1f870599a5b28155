"""`torchrelay explain`: where the time of a request went, and why the platform did what it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from torchrelay.cli import console
from torchrelay.cli.access import HomeOption, JsonOption, KeyOption, UrlOption, tenant_access

EXAMPLE = """Example:  torchrelay explain req-8x2kq0v3m1c9d7fzabcd

Or:       torchrelay explain acme/glossary   (local platform)"""
BAR_CELLS = 40
Phase = Mapping[str, Any]


def explain(
    subject: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="As `chat` shows it; or TENANT/MODEL for its latest decisions.")
    ],
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the timeline of a recent request: queue, plan, relay, prefill, first token and the rest."""
    access = tenant_access(home, url, key)
    if access.home is not None:
        found = _from_scheduler(access.home.endpoints(), subject)
    else:
        with access.client() as client:
            found = client.call("GET", f"/v1/requests/{subject}/explain")
    if as_json:
        console.print_json(found)
        return
    if not found["phases"] and not found["decisions"]:
        console.err().print("nothing has happened to it lately")
        return
    console.out().print(explanation(found["phases"], found["decisions"]))


def _from_scheduler(endpoints: Mapping[str, str], subject: str) -> dict[str, Any]:
    """On the local platform the scheduler itself is asked: it knows requests without tokens, and models."""
    from google.protobuf.json_format import MessageToDict

    from torchrelay.cli import cluster

    named = {"model": subject} if "/" in subject else {"request_id": subject}
    reply = cluster.explain(endpoints["scheduler"], **named, tls=cluster.tls_of(endpoints))
    said = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        "phases": [_with_ints(phase, "begin_unix_us", "end_unix_us") for phase in said["phases"]],
        "decisions": [_with_ints(decision, "at_unix_us") for decision in said["decisions"]],
    }


def _with_ints(said: dict[str, Any], *names: str) -> dict[str, Any]:
    """Protobuf's JSON writes 64-bit integers as strings."""
    return {**said, **{name: int(said[name]) for name in names}}


def explanation(phases: Sequence[Phase], decisions: Sequence[Mapping[str, Any]]) -> Group:
    """A bar per phase on one time line, then the decisions."""
    parts: list[Table | Text] = []
    if phases:
        parts.append(timeline(phases))
    if decisions:
        made = console.table("at", "decision", "of", "because")
        for one in decisions:
            at = datetime.fromtimestamp(one["at_unix_us"] / 1e6).strftime("%H:%M:%S.%f")[:-3]
            made.add_row(at, one["kind"], Text(one["subject"]), Text(one["reason"]))
        parts.append(made)
    return Group(*parts)


def timeline(phases: Sequence[Phase]) -> Table:
    """Begin and length of each phase in ms, and a bar."""
    origin = min(phase["begin_unix_us"] for phase in phases)
    span_us = max(max(phase["end_unix_us"], phase["begin_unix_us"]) for phase in phases) - origin
    made = console.table("phase", "begins", "takes", "", "where", "detail", right=("begins", "takes"))
    for phase in phases:
        begin_us, is_open = phase["begin_unix_us"] - origin, phase["end_unix_us"] < phase["begin_unix_us"]
        took_us = max(phase["end_unix_us"] - phase["begin_unix_us"], 0)
        made.add_row(
            phase["name"],
            f"{begin_us / 1000:,.1f} ms",
            "running" if is_open else f"{took_us / 1000:,.1f} ms",
            bar(begin_us, span_us - begin_us if is_open else took_us, span_us),
            Text(phase["where"]),
            Text(phase["detail"], style="dim"),
        )
    return made


def bar(begin_us: int, took_us: int, span_us: int, cells: int = BAR_CELLS) -> Text:
    """A bar of at least one cell, placed to scale within ``cells``."""
    scale = cells / span_us if span_us else 0.0
    first = min(int(begin_us * scale), cells - 1)
    length = max(1, min(round((begin_us + took_us) * scale), cells) - first)
    return Text.assemble(" " * first, ("█" * length, "cyan"), " " * (cells - first - length))
