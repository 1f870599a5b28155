"""`torchrelay explain`: where a request's time went, and which decisions were made."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated
from urllib.parse import quote

import typer

from torchrelay.cli.api.access import HomeOption, JsonOption, KeyOption, UrlOption, tenant_access
from torchrelay.cli.commands.model_details import checked_name
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
    has_key = key is not None or "TORCHRELAY_API_KEY" in os.environ
    if is_request and access.home is not None and not has_key:  # the operator's also explains requests without a token
        access = replace(access, key=access.home.admin_key())
    named = quote(subject, safe="")
    with access.client() as client:
        explained = client.call("GET", f"/v1/requests/{named}/explain" if is_request else f"/v1/explain?model={named}")
    if as_json:
        console.print_json(explained)
        return
    worth = explained.get("worth", ())
    if not explained["phases"] and not explained["decisions"] and not worth:
        console.err().print("no recent activity")
        return
    console.out().print(explanation(explained["phases"], explained["decisions"], worth))
