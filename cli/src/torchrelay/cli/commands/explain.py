"""`torchrelay explain`: where the time of a request went, and why the platform did what it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import Access, HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.errors import CliError
from torchrelay.cli.views import console
from torchrelay.cli.views.timeline import explanation, until_end

EXAMPLE = """Example:  torchrelay explain req-8x2kq0v3m1c9d7fzabcd

Or:       torchrelay explain acme/glossary   (local platform)"""
SUBJECT = "The id that `chat` shows below an answer (over REST: x-request-id); or a model's name: its latest decisions."


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
