"""``Idempotency-Key``: a request that a client repeats runs once, and its first answer is given again for a day.

The first request with a key takes it by a row in SQL, and goes on to its end even if its client leaves, so that the
repetition finds the answer. An answer that another try could change (429, a fault of the platform, a stream that broke)
is not kept, and neither is the key of a gateway that is gone: then the repetition runs. Each API key has idempotency
keys of its own, since another may not have been allowed to make the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, exists, func, or_, select, update
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, InvalidRequest, RateLimited, TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.exchange.errors import refusal
from torchrelay.gateway.exchange.http_request import HttpRequest
from torchrelay.gateway.http.router import with_plain_path
from torchrelay.gateway.inference.core import ClientDisconnected
from torchrelay.gateway.inference.interfaces import Authenticator
from torchrelay.gateway.limits.connection_shares import ConnectionShares
from torchrelay.gateway.limits.shares import ShareAccount
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.tables import gateways, idempotency

log = get_logger(__name__)
KEPT_S: Final = 86_400
MAX_KEYS: Final = 10_000  # of a tenant, within that time
MAX_ANSWER_BYTES: Final = 256 << 10  # a longer one is not kept
MAX_TENANT_BYTES: Final = 64 << 20  # of answers; then no more are kept
_MAX_KEY_CHARS: Final = 255
_HEADER: Final = b"idempotency-key"
_NOT_KEPT: Final = frozenset((401, 403, 404, 408, 409, 429))
_END_PAUSES_S: Final = (0.0, 0.2, 1.0, 5.0, 30.0, 120.0)  # before each attempt to write the end


class IdempotentApp:
    """Passes requests to ``app``; those with the header on one of ``paths`` once."""

    def __init__(
        self,
        app: ASGIApp,
        paths: Collection[str],
        keys: Authenticator,
        shares: ConnectionShares,
        database: Database,
        gateway_id: str,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._paths = paths
        self._keys = keys
        self._shares = shares
        self._database = database
        self._gateway_id = gateway_id
        self._max_body_bytes = max_body_bytes
        self._running: set[tuple[str, str]] = set()  # tenants and names of requests under way here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = [value for name, value in scope["headers"] if name == _HEADER] if scope["type"] == "http" else []
        if not named or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope = with_plain_path(scope)
        if scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        try:
            await self._once(scope, receive, send, named[-1].decode("latin-1").strip())
        except ClientDisconnected:
            return
        except TorchrelayError as error:
            await refusal(error)(scope, receive, send)

    async def _once(self, scope: Scope, receive: Receive, send: Send, name: str) -> None:
        if not name or len(name) > _MAX_KEY_CHARS:
            raise InvalidRequest(f"must have 1 to {_MAX_KEY_CHARS} characters", field="Idempotency-Key")
        request = HttpRequest(scope, receive)
        caller = await request.authenticate(self._keys)
        name = f"{caller.key_id} {name}"
        shares, tenant_id = self._shares, caller.tenant_id
        with shares.body_bytes.account(tenant_id) as account, shares.answer_bytes.account(tenant_id) as copied:
            body = await request.read(self._max_body_bytes, account)
            digest = hashlib.blake2b(scope["path"].encode() + b"\n" + body, digest_size=16).hexdigest()
            kept = await self._begin(tenant_id, name, digest)
            if kept is not None:
                await _replay(kept, send)
                return
            state: dict[str, Any] = {}
            answer, receive_body = _Answer(send, state, copied), _body_alone(bytes(body), account)
            del body
            try:
                await self._app({**scope, "state": state}, receive_body, answer.send)
            finally:
                ending = self._database.own(asyncio.ensure_future(self._end(tenant_id, name, answer)))
                await asyncio.shield(ending)

    async def _begin(self, tenant_id: str, name: str, digest: str) -> Any:
        """The row of the answer that is kept; None if this request has taken the key.

        Raises ``InvalidRequest`` for another body, ``Conflict`` while the first request runs, and ``RateLimited``.
        """
        now = now_unix_us()
        mine = _is(tenant_id, name)
        row = {"tenant_id": tenant_id, "name": name, "digest": digest, "gateway_id": self._gateway_id}
        async with self._database.write() as connection:
            await connection.execute(
                delete(idempotency).where(*mine, idempotency.c.begun_unix_us < now - KEPT_S * 10**6)
            )
            is_alive = exists().where(gateways.c.gateway_id == idempotency.c.gateway_id)
            is_lost = ~is_alive
            if (tenant_id, name) not in self._running:  # this gateway could not write the end of its request
                is_lost = or_(is_lost, idempotency.c.gateway_id == self._gateway_id)
            await connection.execute(delete(idempotency).where(*mine, idempotency.c.status.is_(None), is_lost))
            new = self._database.insert(idempotency).values({**row, "begun_unix_us": now}).on_conflict_do_nothing()
            if (await connection.execute(new)).rowcount:
                number = select(func.count()).select_from(idempotency).where(idempotency.c.tenant_id == tenant_id)
                if (await connection.execute(number)).scalar_one() > MAX_KEYS:
                    raise RateLimited(f"more than {MAX_KEYS:,} idempotency keys in a day", retry_after_s=600)
                self._running.add((tenant_id, name))
                return None
            kept = (await connection.execute(select(idempotency).where(*mine))).one_or_none()
        if kept is None:  # the first request has just ended, and its answer is not kept
            raise Conflict("the request with this key has just ended", field="Idempotency-Key", retry_after_s=1.0)
        if kept.digest != digest:
            message = "this key was used for another request; a new request needs a key of its own"
            raise InvalidRequest(message, field="Idempotency-Key")
        if kept.status is None:
            raise Conflict("the request with this key is running", field="Idempotency-Key", retry_after_s=1.0)
        return kept

    async def _end(self, tenant_id: str, name: str, answer: _Answer) -> None:
        try:
            await self._end_in_time(tenant_id, name, answer)
        finally:
            self._running.discard((tenant_id, name))

    async def _end_in_time(self, tenant_id: str, name: str, answer: _Answer) -> None:
        for pause_s in _END_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await self._write_end(tenant_id, name, answer)
                return
            except TorchrelayError as error:
                log.warning("idempotent_answer_not_written", error=error.message)

    async def _write_end(self, tenant_id: str, name: str, answer: _Answer) -> None:
        mine = *_is(tenant_id, name), idempotency.c.gateway_id == self._gateway_id, idempotency.c.status.is_(None)
        of_tenant = select(func.coalesce(func.sum(idempotency.c.num_bytes), 0))
        async with self._database.write() as connection:
            held = (await connection.execute(of_tenant.where(idempotency.c.tenant_id == tenant_id))).scalar_one()
            if not answer.is_kept or int(held) + len(answer.body) > MAX_TENANT_BYTES:
                await connection.execute(delete(idempotency).where(*mine))
                return
            headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in answer.headers]
            values = {"status": answer.status, "headers": json.dumps(headers), "body": bytes(answer.body)}
            kept = update(idempotency).where(*mine).values(values | {"num_bytes": len(answer.body)})
            await connection.execute(kept)


async def forget_old_answers(database: Database) -> None:
    """Deletes what is older than a day. Raises ``Unavailable`` without SQL."""
    async with database.write() as connection:
        begun = idempotency.c.begun_unix_us
        await connection.execute(delete(idempotency).where(begun < now_unix_us() - KEPT_S * 10**6))


class _Answer:
    """An answer on its way to the client, and a copy of it."""

    def __init__(self, send: Send, state: Mapping[str, Any], copied: ShareAccount) -> None:
        """``state``: of the request; the application notes there that the answer broke. ``copied`` counts the copy."""
        self._send, self._state, self._copied = send, state, copied
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self._is_whole, self._is_copied = False, True

    @property
    def is_kept(self) -> bool:
        is_final = 0 < self.status < 500 and self.status not in _NOT_KEPT
        return self._is_whole and is_final and self._is_copied and not self._state.get("answer_broke")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], [*message["headers"]]
        else:
            self._is_whole = not message.get("more_body", False)
            self._copy(message.get("body", b""))
        await self._send(message)

    def _copy(self, part: bytes) -> None:
        if not self._is_copied:
            return
        try:
            if len(self.body) + len(part) > MAX_ANSWER_BYTES:
                raise RateLimited("the answer is too long to be kept")
            self._copied.take(len(part))
        except TorchrelayError:  # it is delivered all the same
            self._is_copied = False
            self.body = bytearray()
        else:
            self.body += part


def _is(tenant_id: str, name: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return idempotency.c.tenant_id == tenant_id, idempotency.c.name == name


def _body_alone(body: bytes, account: ShareAccount) -> Receive:
    """A body, which the application counts from now on, and after which the client never leaves."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        if not messages:
            await asyncio.Event().wait()
        account.release()
        return messages.pop()

    return received


async def _replay(kept: Any, send: Send) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in json.loads(kept.headers)]
    headers.append((b"idempotent-replayed", b"true"))
    await send({"type": "http.response.start", "status": kept.status, "headers": headers})
    await send({"type": "http.response.body", "body": kept.body})
