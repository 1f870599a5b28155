from __future__ import annotations

import base64
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.unit.gateway.conftest import DATABASES, AccountingRig
from torchrelay.common.errors import Conflict, NotFound
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.sql.event_outbox import EVENT_TYPES, emit
from torchrelay.gateway.sql.tables import audit
from torchrelay.gateway.sql.tables import webhooks as rows
from torchrelay.gateway.webhooks import delivery
from torchrelay.gateway.webhooks import webhooks as module
from torchrelay.gateway.webhooks.budget_warnings import warn_of_budgets
from torchrelay.gateway.webhooks.delivery import MAX_EVENTS, deliver_due
from torchrelay.gateway.webhooks.webhooks import Webhooks


@dataclass
class Receiver:
    """An address that takes batches, once it has refused ``num_refusals`` of them."""

    url: str = ""
    status: int = 204
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [event["id"] for body in self.bodies for event in json.loads(body)]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if receiver.status == 204:
                receiver.bodies.append(body)
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(receiver.status)
            if receiver.status == 302:
                self.send_header("location", f"{receiver.url}/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}/events"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


async def settle(parts: AccountingRig, request_id: str, key_id: str = "key-1") -> int:
    await parts.ledger.open(replace(parts.request(request_id), key_id=key_id))
    return await parts.ledger.settle(request_id, [ChoiceUsage(request_id, 0, 10, 0, 10, FinishCause.STOP)])


async def make_due(parts: AccountingRig) -> None:
    async with parts.database.write() as connection:
        await connection.execute(update(rows).values(next_unix_us=0))


async def test_address_gets_each_event_once_in_order_and_signed(parts: AccountingRig) -> None:
    await settle(parts, "before")
    webhooks = Webhooks(parts.database)
    with receiving() as receiver:
        made = await webhooks.create(None, receiver.url, EVENT_TYPES)
        for number in range(3):
            await settle(parts, f"req-{number}")
        async with parts.database.write() as connection:
            await emit(connection, "invoice.closed", parts.acme.tenant_id, {"number": 1})
        for _ in range(2):
            await make_due(parts)
            await deliver_due(webhooks, parts.database)
        assert receiver.ids == ["event-1", "req-0.0.0", "req-1.0.0", "req-2.0.0"]
        [body], [headers] = receiver.bodies, receiver.headers
        event = json.loads(body)[1]
        assert (event["specversion"], event["type"], event["data"]["request"]) == ("1.0", "torchrelay.usage", "req-0")
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(made.secret.removeprefix("whsec_"))
        signature = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
        assert headers["webhook-signature"] == f"v1,{signature}"
        await webhooks.delete(made.webhook_id)
        with pytest.raises(NotFound):
            await webhooks.delete(made.webhook_id)


async def test_refused_events_are_sent_again_later(parts: AccountingRig) -> None:
    """A redirection is a refusal: it could lead anywhere."""
    webhooks = Webhooks(parts.database)
    with receiving() as receiver:
        await webhooks.create(None, receiver.url, ["usage"])
        for number in range(MAX_EVENTS + 20):
            await settle(parts, f"req-{number}")
        for status, failures in ((500, 1), (302, 2)):
            receiver.status = status
            await make_due(parts)
            await deliver_due(webhooks, parts.database)
            await deliver_due(webhooks, parts.database)  # not due yet
            [kept] = await webhooks.list()
            assert (kept.num_failures, receiver.bodies) == (failures, []) and str(status) in kept.last_error
        receiver.status = 204
        await make_due(parts)
        await deliver_due(webhooks, parts.database)
        assert receiver.ids == [f"req-{number}.0.0" for number in range(MAX_EVENTS + 20)]
        assert [len(json.loads(body)) for body in receiver.bodies] == [MAX_EVENTS, 20]
        [kept] = await webhooks.list()
        assert (kept.num_failures, kept.last_error) == (0, "")


async def test_webhook_of_a_tenant_gets_no_others_events(parts: AccountingRig) -> None:
    webhooks, other = Webhooks(parts.database), await parts.tenants.create("zoo")
    with receiving() as receiver:
        await webhooks.create(other.tenant_id, receiver.url, EVENT_TYPES)
        await settle(parts, "req-1")
        async with parts.database.write() as connection:
            for tenant_id in (parts.acme.tenant_id, other.tenant_id):
                await emit(connection, "invoice.closed", tenant_id, {"tenant": tenant_id})
        await deliver_due(webhooks, parts.database)
        [event] = json.loads(receiver.bodies[0])
        assert event["data"] == {"tenant": other.tenant_id}
        await parts.ledger.open(replace(parts.request("req-2"), tenant_id=other.tenant_id))
        await parts.ledger.settle("req-2", [ChoiceUsage("req-2", 0, 10, 0, 10, FinishCause.STOP)])
        await make_due(parts)
        await deliver_due(webhooks, parts.database)
        [usage] = json.loads(receiver.bodies[1])
        assert usage["id"] == "req-2.0.0" and "id" not in usage["data"], "the number of the ledger tells of all tenants"


async def test_webhooks_take_turns_and_places_only_rise(parts: AccountingRig) -> None:
    webhooks = Webhooks(parts.database)
    for number in range(2):
        await webhooks.create(None, f"https://{number}.example/secret", ["usage"])
    first, second = [await webhooks.lease_due(60) for _ in range(2)]
    assert first is not None and second is not None and first.webhook_id != second.webhook_id
    assert await webhooks.lease_due(60) is None
    await webhooks.taken(first, 9, 9, 100.0)
    await webhooks.taken(first, 3, 3, 0.0)  # too late: its lease is over
    places = {each.webhook_id: each.last_ledger_id for each in await webhooks.list()}
    assert places == {first.webhook_id: 9, second.webhook_id: 0}
    async with parts.database.read() as connection:
        logged = [row.after for row in await connection.execute(select(audit)) if row.action == "webhook.create"]
    assert len(logged) == 2 and all("example" in text and "secret" not in text for text in logged)


async def test_number_of_webhooks_is_bounded(parts: AccountingRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WEBHOOKS", 1)
    webhooks = Webhooks(parts.database)
    await webhooks.create(None, "https://a.example", ["usage"])
    with pytest.raises(Conflict, match="delete one first"):
        await webhooks.create(None, "https://b.example", ["usage"])


async def test_budgets_warn_once_at_80_percent_and_when_they_are_spent(parts: AccountingRig) -> None:
    webhooks, warned = Webhooks(parts.database), list[tuple[str, str]]()

    async def note(tenant: str, sentence: str) -> None:
        warned.append((tenant, sentence))

    info, _ = await parts.keys.create(parts.acme.tenant_id)
    with receiving() as receiver:
        await webhooks.create(None, receiver.url, ["budget.warning"])
        cost = await settle(parts, "req-0", info.key_id)
        await parts.keys.change(info.key_id, None, {"budget_nano": cost * 5, "budget_period": "month"})
        await parts.tenants.change("acme", {"budget_nano": cost * 4})
        for number in range(1, 6):
            await warn_of_budgets(parts.database, note)
            await settle(parts, f"req-{number}", info.key_id)
        await warn_of_budgets(parts.database, note)
        await deliver_due(webhooks, parts.database)
        of_key = f"key {info.key_id} has spent"
        assert warned == [
            ("acme", "the tenant has spent 80% of its budget"),
            ("acme", "the tenant has spent 100% of its budget"),
            ("acme", f"{of_key} 80% of its budget"),
            ("acme", f"{of_key} 100% of its budget"),
        ]
        told: list[dict[str, Any]] = [event["data"] for event in json.loads(receiver.bodies[0])]
        assert [(each["key_id"], each["percent"]) for each in told] == [
            (None, 80),
            (None, 100),
            (info.key_id, 80),
            (info.key_id, 100),
        ]
        assert (told[3]["spent_nano"], told[3]["budget_nano"], told[3]["budget_period"]) == (
            cost * 5,
            cost * 5,
            "month",
        )


async def test_address_that_never_ends_its_answer_delays_no_other(
    parts: AccountingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_LONGEST_POST_S", 0.2)
    webhooks, listening = Webhooks(parts.database), socket.create_server(("127.0.0.1", 0))
    with listening, receiving() as receiver:
        await webhooks.create(None, f"http://127.0.0.1:{listening.getsockname()[1]}", ["usage"])
        await webhooks.create(None, receiver.url, ["usage"])
        await settle(parts, "req-1")
        await deliver_due(webhooks, parts.database)
        assert receiver.ids == ["req-1.0.0"]
        assert sorted(each.last_error for each in await webhooks.list()) == ["", "no whole answer within 0.2 s"]
