"""Sends events to webhooks as CloudEvents 1.0 in batched JSON, signed as Standard Webhooks are.

One gateway at a time sends for a webhook (its row in SQL is leased). A failed try is followed by another, at longer and
longer intervals; the receiver knows repetitions by the ids of the events.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import http.client
import json
import threading
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from torchrelay.common.clock import now_unix_us
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.billing.usage_export import exported_pages, usage_object
from torchrelay.gateway.billing.usage_query import UsageFilter
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.webhooks.webhooks import Webhook, Webhooks

log = get_logger(__name__)
MAX_EVENTS: Final = 100  # of a batch
_TIMEOUT_S: Final = 10.0
_LONGEST_POST_S: Final = 30.0  # in all
_LEASE_S: Final = 60.0
_THREAD, _MAX_THREADS = "webhook", 16
_IDLE_S: Final = 5.0  # until the next look at a webhook that has everything
_LONGEST_WAIT_S: Final = 3600.0
_NO_LONGER_WAITS_AFTER: Final = 12  # failures


async def deliver_due(webhooks: Webhooks, database: Database) -> None:
    """Sends what is due. Raises ``Unavailable`` without SQL."""
    while (webhook := await webhooks.lease_due(_LEASE_S)) is not None:
        await _deliver(webhook, webhooks, database)


async def _deliver(webhook: Webhook, webhooks: Webhooks, database: Database) -> None:
    events, last_event_id = await webhooks.events_for(webhook, MAX_EVENTS)
    batch = [_cloud_event(f"event-{row.event_id}", row.type, row.at_unix_us, json.loads(row.data)) for row in events]
    last_ledger_id = webhook.last_ledger_id
    if "usage" in webhook.types and len(batch) < MAX_EVENTS:
        filter_ = UsageFilter(webhook.tenant_id)
        limit = MAX_EVENTS - len(batch)
        async for page in exported_pages(database, filter_, last_ledger_id, limit, has_own_numbers=False):
            for number, row in page:
                data = usage_object(number, row)
                if webhook.tenant_id is not None:  # the number tells of all tenants
                    del data["id"]
                id_ = f"{row.request_id}.{row.choice}.{row.supplement}"
                batch.append(_cloud_event(id_, "usage", row.settled_unix_us, data))
                last_ledger_id = number
    if not batch:
        await webhooks.taken(webhook, last_ledger_id, last_event_id, _IDLE_S)
        return
    body = json.dumps(batch).encode()
    error = await _post_in_time(webhook.url, body, signed_headers(webhook.secret, batch[0]["id"], body))
    if error:
        wait_s = min(_LONGEST_WAIT_S, 2.0 ** min(webhook.num_failures, _NO_LONGER_WAITS_AFTER))
        log.warning("webhook_refused", webhook_id=webhook.webhook_id, error=error[:200], again_in_s=wait_s)
        await webhooks.refused(webhook, error, wait_s)
    else:
        await webhooks.taken(webhook, last_ledger_id, last_event_id, 0.0)


async def _post_in_time(url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """``_post`` in a thread that neither this gateway's work nor its end waits for: a receiver may answer for ever."""
    if sum(thread.name == _THREAD for thread in threading.enumerate()) >= _MAX_THREADS:
        return "too many addresses do not end their answers"
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[str] = loop.create_future()

    def note(error: str) -> None:
        if not answered.done():
            answered.set_result(error)

    def post() -> None:
        error = _post(url, body, headers)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(note, error)

    threading.Thread(target=post, name=_THREAD, daemon=True).start()
    try:
        return await asyncio.wait_for(answered, _LONGEST_POST_S)
    except TimeoutError:
        return f"no whole answer within {_LONGEST_POST_S:g} s"


def _cloud_event(id_: str, type_: str, at_unix_us: int, data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": id_,
        "source": "/torchrelay",
        "type": f"torchrelay.{type_}",
        "time": datetime.fromtimestamp(at_unix_us / 1e6, UTC).isoformat(),
        "datacontenttype": "application/json",
        "data": data,
    }


def signed_headers(secret: str, id_: str, body: bytes) -> dict[str, str]:
    """The headers of a request: HMAC-SHA256 over id, time and body, by https://www.standardwebhooks.com."""
    timestamp = str(now_unix_us() // 1_000_000)
    key = base64.b64decode(secret.removeprefix("whsec_"))
    mac = hmac.digest(key, f"{id_}.{timestamp}.".encode() + body, "sha256")
    return {
        "content-type": "application/cloudevents-batch+json; charset=utf-8",
        "webhook-id": id_,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(mac).decode()}",
    }


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An address answers itself: a redirection could lead anywhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """The error of a try; empty if the address has taken the events."""
    request = urllib.request.Request(url, body, dict(headers), method="POST")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S) as answer:
            answer.read(1)
        return ""
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or repr(error)
