from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, insert, select, update
from starlette.types import Receive, Scope, Send

from tests.support.wait import eventually
from tests.unit.gateway.conftest import AccountingRig
from torchrelay.common.errors import Unavailable
from torchrelay.gateway.http import idempotency
from torchrelay.gateway.http.idempotency import IdempotentApp, forget_old_answers
from torchrelay.gateway.limits.connection_shares import connection_shares
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.gateway.sql.tables import gateways
from torchrelay.gateway.sql.tables import idempotency as rows


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    return sqlite_url


@dataclass
class Inner:
    """The application behind: it answers with the number of its calls."""

    status: int = 200
    parts: tuple[bytes, ...] = ()
    breaks: bool = False
    calls: list[bytes] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls.append((await receive())["body"])
        number = len(self.calls)
        await self.may_end.wait()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"req-%d" % number)]
        if self.breaks:
            scope["state"]["answer_broke"] = True  # as the token path notes
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b'{"call": %d}' % number})


@dataclass
class OnceRig:
    parts: AccountingRig
    inner: Inner
    http: httpx.AsyncClient
    other: httpx.AsyncClient

    async def post(self, key: str = "k", body: bytes = b"{}", path: str = "/v1/completions") -> httpx.Response:
        return await self.http.post(path, content=body, headers={"idempotency-key": key})


@pytest.fixture
async def once(parts: AccountingRig) -> AsyncIterator[OnceRig]:
    inner = Inner()
    inner.may_end.set()
    async with parts.database.write() as connection:
        await connection.execute(insert(gateways).values(gateway_id="gw-1", beat=1))
    shares = connection_shares(GatewaySettings())
    app: Any = IdempotentApp(inner, ["/v1/completions"], parts.keys, shares, parts.database, "gw-1", 1000)
    zoo = await parts.tenants.create("zoo")
    clients = []
    for tenant_id in (parts.acme.tenant_id, zoo.tenant_id):
        _, token = await parts.keys.create(tenant_id)
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        transport = httpx.ASGITransport(app)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers))
    yield OnceRig(parts, inner, clients[0], clients[1])
    for client in clients:
        await client.aclose()


async def test_repeated_request_gets_the_first_answer(once: OnceRig) -> None:
    first, again = await once.post(), await once.post()
    assert (first.content, first.headers["x-request-id"]) == (again.content, again.headers["x-request-id"])
    assert "idempotent-replayed" not in first.headers and again.headers["idempotent-replayed"] == "true"
    assert once.inner.calls == [b"{}"]
    await once.post("another")
    await once.other.post("/v1/completions", content=b"{}", headers={"idempotency-key": "k"})
    await once.http.post("/v1/completions", content=b"{}")
    assert len(once.inner.calls) == 4, "other keys, other tenants, and requests without a key"


async def test_key_of_another_request_is_refused(once: OnceRig) -> None:
    await once.post()
    refused = await once.post(body=b'{"n": 2}')
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "Idempotency-Key"
    assert (await once.post("x" * 256)).status_code == 400
    assert len(once.inner.calls) == 1


async def test_repetition_waits_for_the_first_request(once: OnceRig) -> None:
    """Which goes on to its end although its client has left."""
    once.inner.may_end.clear()
    running = asyncio.ensure_future(once.post())
    await eventually(lambda: once.inner.calls == [b"{}"])
    refused = await once.post()
    assert (refused.status_code, refused.headers["retry-after"]) == (409, "1")
    once.inner.may_end.set()
    assert (await running).content == (await once.post()).content == b'{"call": 1}'


@pytest.mark.parametrize(
    ("status", "bodies", "breaks", "is_kept"),
    [
        (400, (), False, True),
        (429, (), False, False),
        (500, (), False, False),
        (403, (), False, False),
        (404, (), False, False),
        (200, (b'data: {"error": {}}',), False, True),  # a field of an answer
        (200, (b"data",), True, False),
        (200, (b"x" * (idempotency.MAX_ANSWER_BYTES + 1),), False, False),
    ],
)
async def test_answer_that_another_try_could_change_is_not_kept(
    once: OnceRig, status: int, bodies: tuple[bytes, ...], breaks: bool, is_kept: bool
) -> None:
    once.inner.status, once.inner.parts, once.inner.breaks = status, bodies, breaks
    answers = [await once.post() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert len(once.inner.calls) == (1 if is_kept else 2)


async def test_key_of_a_lost_gateway_is_free(once: OnceRig) -> None:
    await once.post()
    async with once.parts.database.write() as connection:
        await connection.execute(update(rows).values(status=None, gateway_id="gw-2"))
        await connection.execute(insert(gateways).values(gateway_id="gw-2", beat=1))
    assert (await once.post()).status_code == 409
    async with once.parts.database.write() as connection:
        await connection.execute(delete(gateways).where(gateways.c.gateway_id == "gw-2"))
    assert (await once.post()).json() == {"call": 2}


async def test_answers_are_forgotten_after_a_day(once: OnceRig) -> None:
    await once.post()
    await once.post("young")
    old = update(rows).where(rows.c.name.endswith(" k")).values(begun_unix_us=1)
    async with once.parts.database.write() as connection:
        await connection.execute(old)
    assert (await once.post()).json() == {"call": 3}
    async with once.parts.database.write() as connection:
        await connection.execute(old)
    await forget_old_answers(once.parts.database)
    async with once.parts.database.read() as connection:
        [name] = (await connection.execute(select(rows.c.name))).scalars()
    assert name.endswith(" young")


async def test_keys_of_a_tenant_are_bounded(once: OnceRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_KEYS", 2)
    assert [(await once.post(str(number))).status_code for number in range(3)] == [200, 200, 429]
    assert (await once.post("1")).status_code == 200, "its answer is kept"


async def test_key_of_another_path_form_counts_too(once: OnceRig) -> None:
    answers = [await once.post(path=path) for path in ("/v1/completions", "/v1/completions/", "/v1//completions")]
    assert len({answer.content for answer in answers}) == 1 and len(once.inner.calls) == 1


async def test_another_key_of_the_tenant_gets_no_answer_of_this_one(once: OnceRig) -> None:
    await once.post()
    _, token = await once.parts.keys.create(once.parts.acme.tenant_id)
    headers = {"idempotency-key": "k", "authorization": f"Bearer {token}"}
    assert (await once.http.post("/v1/completions", content=b"{}", headers=headers)).json() == {"call": 2}


async def test_answers_of_a_tenant_are_kept_up_to_a_size(once: OnceRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_TENANT_BYTES", 15)
    for key in ("a", "b", "a", "b"):
        assert (await once.post(key)).status_code == 200
    assert len(once.inner.calls) == 3, "the answer to the second is not kept"


async def test_end_is_written_when_the_database_is_back(once: OnceRig) -> None:
    once.inner.may_end.clear()
    running = asyncio.ensure_future(once.post())
    await eventually(lambda: once.inner.calls == [b"{}"])
    write, failures = once.parts.database.write, [Unavailable("away")]

    def fails_once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return write(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(once.parts.database, "write", fails_once)
        once.inner.may_end.set()
        assert (await running).json() == {"call": 1}
    assert (await once.post()).headers["idempotent-replayed"] == "true"


async def test_key_whose_end_could_not_be_written_is_free(once: OnceRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_END_PAUSES_S", ())
    await once.post()
    assert (await once.post()).json() == {"call": 2}
