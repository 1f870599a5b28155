"""`torchrelay explain`: where the time of a request went, and why the platform did what it did."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group
from rich.text import Text

from torchrelay.cli.api.access import Access, HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.console import NARROW_CELLS, ResultTable, WidthAware

EXAMPLE = """Example:  torchrelay explain req-8x2kq0v3m1c9d7fzabcd

Or:       torchrelay explain acme/glossary   (local platform)"""
SUBJECT = "The id that `chat` shows below an answer (over REST: x-request-id); or a model's name: its latest decisions."
BAR_CELLS = 40
COLUMNS_CELLS = 80  # what the columns beside the bar want
LAST_PHASE = "decode"  # its gateway sends it when the request is over
Phase = Mapping[str, Any]
Decision = Mapping[str, Any]
_ID = re.compile(r"\b((?:[a-z]+-)+[0-9a-z]{6})[0-9a-z]{14}\b")


def explain(
    subject: Annotated[
        str,
        typer.Argument(metavar="REQUEST_ID", help=SUBJECT),
    ],
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the timeline of a recent request: prepare, queue, plan, relay, prefill, first token, decode.

    Time zero is when the gateway began with the request, before key and prompt were looked at.
    """
    access = tenant_access(home, url, key)
    is_request = subject.startswith("req-")
    if not is_request:
        subject = _full_model_name(access, subject)
    if access.home is not None:
        found = _from_scheduler(access.home.endpoints(), subject, is_request)
    else:
        with access.client() as client:
            found = client.call("GET", f"/v1/requests/{quote(subject)}/explain")
    found["decisions"] = until_end(found["phases"], found["decisions"])
    if as_json:
        console.print_json(found)
        return
    if not found["phases"] and not found["decisions"]:
        console.err().print("nothing has happened to it lately")
        return
    console.out().print(explanation(found["phases"], found["decisions"]))


def _full_model_name(access: Access, name: str) -> str:
    """The model's full name. Raises ``Problem`` when there is none, or when its platform is elsewhere."""
    with access.client() as client:
        full_name: str = client.call("GET", f"/v1/models/{quote(name)}")["id"]
    if access.home is None:
        raise CliError(
            "a model's decisions are shown where its platform runs",
            "ask about a request: torchrelay explain REQUEST_ID",
        )
    return full_name


def until_end(phases: Sequence[Phase], decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions up to the request's end; all while it runs. What its model does later is not its story."""
    if not any(phase["name"] == LAST_PHASE for phase in phases):
        return list(decisions)
    end_unix_us = max(phase["end_unix_us"] for phase in phases)
    return [decision for decision in decisions if decision["at_unix_us"] <= end_unix_us]


def _from_scheduler(endpoints: Mapping[str, str], subject: str, is_request: bool) -> dict[str, Any]:
    """On the local platform the scheduler itself is asked: it knows requests without tokens, and models."""
    from google.protobuf.json_format import MessageToDict

    from torchrelay.cli.api import scheduler_client

    named = {"request_id": subject} if is_request else {"model": subject}
    reply = scheduler_client.explain(endpoints["scheduler"], **named, tls=scheduler_client.local_tls(endpoints))
    said = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        "phases": [_with_ints(phase, "begin_unix_us", "end_unix_us") for phase in said["phases"]],
        "decisions": [_with_ints(decision, "at_unix_us") for decision in said["decisions"]],
    }


def _with_ints(said: dict[str, Any], *names: str) -> dict[str, Any]:
    """Protobuf's JSON writes 64-bit integers as strings."""
    return {**said, **{name: int(said[name]) for name in names}}


def explanation(phases: Sequence[Phase], decisions: Sequence[Decision]) -> WidthAware:
    """A bar per phase on one time line, then the decisions; on a narrow terminal without bars."""

    def draw(width: int) -> Group:
        parts = (
            [timeline(phases, min(BAR_CELLS, width - COLUMNS_CELLS) if width >= NARROW_CELLS else 0)] if phases else []
        )
        return Group(*parts, *([decisions_table(decisions)] if decisions else []))

    return WidthAware(draw)


def decisions_table(decisions: Sequence[Decision]) -> ResultTable:
    """What was decided, about what, and why."""
    made = ResultTable("at", "decision", "of", "because", whole=("at", "decision", "of"), is_narrow=True)
    for one in decisions:
        at = datetime.fromtimestamp(one["at_unix_us"] / 1e6).strftime("%H:%M:%S.%f")[:-3]
        made.add_line(at, one["kind"], Text(shorten_ids(one["subject"])), Text(shorten_ids(one["reason"])))
    return made


def timeline(phases: Sequence[Phase], bar_cells: int = BAR_CELLS) -> ResultTable:
    """Begin and length of each phase in ms, and a bar of ``bar_cells`` (0: none)."""
    origin = min(phase["begin_unix_us"] for phase in phases)
    span_us = max(max(phase["end_unix_us"], phase["begin_unix_us"]) for phase in phases) - origin
    made = ResultTable(
        *("phase", "begins", "takes", "", "where", "detail"),
        right=("begins", "takes"),
        whole=("phase", "", "where"),
        without=() if bar_cells else ("",),
        is_narrow=True,
    )
    for phase in phases:
        begin_us, is_open = phase["begin_unix_us"] - origin, phase["end_unix_us"] < phase["begin_unix_us"]
        took_us = max(phase["end_unix_us"] - phase["begin_unix_us"], 0)
        made.add_line(
            phase["name"],
            f"{begin_us / 1000:,.1f} ms",
            "running" if is_open else f"{took_us / 1000:,.1f} ms",
            bar(begin_us, span_us - begin_us if is_open else took_us, span_us, bar_cells or BAR_CELLS),
            Text(shorten_ids(phase["where"])),
            Text(shorten_ids(phase["detail"]), style="dim"),
        )
    return made


def shorten_ids(text: str) -> str:
    """For people: ids of twenty random letters by their first six, as in ``inst-njqw24``."""
    return _ID.sub(r"\1", text)


def bar(begin_us: int, took_us: int, span_us: int, cells: int = BAR_CELLS) -> Text:
    """A bar of at least one cell, placed to scale within ``cells``."""
    scale = cells / span_us if span_us else 0.0
    first = min(int(begin_us * scale), cells - 1)
    length = max(1, min(round((begin_us + took_us) * scale), cells) - first)
    return Text.assemble(" " * first, ("█" * length, "cyan"), " " * (cells - first - length))
