"""`torchrelay explain`: where a request's time went, and which decisions were made."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import Access, HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.commands.model_details import checked_name
from torchrelay.cli.home import Home
from torchrelay.cli.views import console
from torchrelay.cli.views.timeline import explanation

EXAMPLE = """Example:  torchrelay explain req-8x2kq0v3m1c9d7fzabcd

Or:       torchrelay explain acme/glossary"""
_REQUEST_PREFIXES = ("req-", "resp_")  # the latter: of the Responses API
SUBJECT = "The request id below an answer of `chat` (REST: x-request-id), or a model's name for its latest decisions."


def explain(
    subject: Annotated[str, typer.Argument(metavar="REQUEST_ID", help=SUBJECT, callback=checked_name)],
    home: HomeOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the timeline of a recent request: prepare, queue, plan, relay, prefill, first token, decode.

    Time zero is when the gateway received the request, before it checked key and prompt.
    """
    is_request = subject.startswith(_REQUEST_PREFIXES)
    access = tenant_access(home, url, key, "" if is_request else subject)
    explained = _explained(access, subject, is_request)
    if as_json:
        console.print_json(explained)
        return
    worth = explained.get("worth", ())
    if not explained["phases"] and not explained["decisions"] and not worth:
        console.err().print("no recent activity")
        return
    console.out().print(explanation(explained["phases"], explained["decisions"], worth))


def _explained(access: Access, subject: str, is_request: bool) -> dict[str, Any]:
    if access.home is not None:
        return _from_scheduler(access.home, subject if is_request else _full_model_name(access, subject), is_request)
    named = quote(subject, safe="")
    path = f"/v1/requests/{named}/explain" if is_request else f"/v1/explain?model={named}"
    with access.client() as client:
        explained: dict[str, Any] = client.call("GET", path)
    return explained


def _full_model_name(access: Access, name: str) -> str:
    with access.client() as client:
        full_name: str = client.call("GET", f"/v1/models/{quote(name)}")["id"]
    return full_name


def _from_scheduler(home: Home, subject: str, is_request: bool) -> dict[str, Any]:
    """Asks the local scheduler, which also knows models and requests without tokens."""
    from google.protobuf.json_format import MessageToDict

    from torchrelay.cli.api import scheduler_client

    named = {"request_id": subject} if is_request else {"model": subject}
    address, tls, token, _ = scheduler_client.scheduler_access(home.path, None)
    reply = scheduler_client.explain(address, **named, tls=tls, token=token)
    reply_dict = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {
        "phases": [_with_ints(phase, "begin_unix_us", "end_unix_us") for phase in reply_dict["phases"]],
        "decisions": [_with_ints(decision, "at_unix_us") for decision in reply_dict["decisions"]],
        "worth": reply_dict["worth"],
    }


def _with_ints(reply_dict: dict[str, Any], *names: str) -> dict[str, Any]:
    """Converts fields back: protobuf's JSON has 64-bit integers as strings."""
    return {**reply_dict, **{name: int(reply_dict[name]) for name in names}}
