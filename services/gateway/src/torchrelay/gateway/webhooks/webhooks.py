"""The tables of webhooks and of the events that wait for them.

A webhook has two places: the number of the last ledger row, and that of the last event, that its address has taken.
Both only rise, so that an address gets everything at least once and in order, whichever gateway sends it.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from sqlalchemy import Row, delete, func, insert, select, update

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, NotFound
from torchrelay.common.ids import new_id
from torchrelay.gateway.sql.audit import record
from torchrelay.gateway.sql.database import Database
from torchrelay.gateway.sql.event_outbox import EventType
from torchrelay.gateway.sql.tables import counters, webhook_events, webhooks

MAX_WEBHOOKS: Final = 100
_KEPT_US: Final = 30 * 86_400 * 1_000_000  # events that no webhook has taken


@dataclass(frozen=True, slots=True)
class Webhook:
    webhook_id: str
    tenant_id: str | None  # whose events it gets; None: of all tenants
    url: str
    secret: str
    types: frozenset[str]
    created_unix_us: int
    last_ledger_id: int
    last_event_id: int
    num_failures: int  # since the last success
    next_unix_us: int  # of the next try
    last_error: str


class Webhooks:
    """Owns both tables."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, tenant_id: str | None, url: str, types: Collection[EventType]) -> Webhook:
        """Creates a webhook for what happens from now on. Raises ``Conflict`` beyond ``MAX_WEBHOOKS``."""
        secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
        async with self._database.write() as connection:
            if (await connection.execute(select(func.count()).select_from(webhooks))).scalar_one() >= MAX_WEBHOOKS:
                raise Conflict(f"there are {MAX_WEBHOOKS} webhooks; delete one first", field="url")
            last = {row.name: row.last for row in await connection.execute(select(counters))}
            row = {
                "webhook_id": new_id("whk"),
                "tenant_id": tenant_id,
                "url": url,
                "secret": secret,
                "types": json.dumps(sorted(types)),
                "created_unix_us": now_unix_us(),
                "last_ledger_id": last["ledger"],
                "last_event_id": last["webhook_events"],
            }
            await connection.execute(insert(webhooks).values(row))
            made = (await connection.execute(_one(row["webhook_id"]))).one()
            shown = {"host": urlsplit(url).hostname, "types": sorted(types)}  # the rest may have a secret
            await record(connection, "webhook.create", made.webhook_id, tenant_id, None, shown)
        return _webhook(made)

    async def delete(self, webhook_id: str) -> None:
        """Raises ``NotFound``."""
        async with self._database.write() as connection:
            gone = delete(webhooks).where(webhooks.c.webhook_id == webhook_id)
            row = (await connection.execute(gone.returning(webhooks.c.tenant_id, webhooks.c.url))).one_or_none()
            if row is None:
                raise NotFound(f"webhook {webhook_id!r} not found", field="webhook_id")
            await record(
                connection, "webhook.delete", webhook_id, row.tenant_id, {"host": urlsplit(row.url).hostname}, None
            )

    async def list(self) -> Sequence[Webhook]:
        async with self._database.read() as connection:
            rows = await connection.execute(select(webhooks).order_by(webhooks.c.created_unix_us))
            return [_webhook(row) for row in rows]

    async def lease_due(self, lease_s: float) -> Webhook | None:
        """A webhook whose next try is due, which no other gateway gets for ``lease_s``; None: there is none."""
        now = now_unix_us()
        table = webhooks.c
        until = now + int(lease_s * 1e6)
        longest_due = select(table.webhook_id).where(table.next_unix_us <= now).order_by(table.next_unix_us).limit(1)
        async with self._database.read() as connection:
            due = (await connection.execute(longest_due)).scalar_one_or_none()
        if due is None:
            return None
        taken = update(webhooks).where(table.webhook_id == due, table.next_unix_us <= now).values(next_unix_us=until)
        async with self._database.write() as connection:
            row = (await connection.execute(taken.returning(*table))).one_or_none()
        return None if row is None else _webhook(row)

    async def taken(self, webhook: Webhook, last_ledger_id: int, last_event_id: int, again_s: float) -> None:
        """Notes that the address has taken everything up to these places, and will be asked again."""
        values = {"last_ledger_id": last_ledger_id, "last_event_id": last_event_id, "num_failures": 0, "last_error": ""}
        await self._set(webhook, values, again_s)

    async def refused(self, webhook: Webhook, error: str, again_s: float) -> None:
        await self._set(webhook, {"num_failures": webhook.num_failures + 1, "last_error": error[:500]}, again_s)

    async def _set(self, webhook: Webhook, values: Mapping[str, Any], again_s: float) -> None:
        following = {**values, "next_unix_us": now_unix_us() + int(again_s * 1e6)}
        async with self._database.write() as connection:
            leased = webhooks.c.webhook_id == webhook.webhook_id, webhooks.c.next_unix_us == webhook.next_unix_us
            await connection.execute(update(webhooks).where(*leased).values(following))  # unless the lease was over

    async def events_for(self, webhook: Webhook, limit: int) -> tuple[Sequence[Row[Any]], int]:
        """The next events for the webhook, and the place up to which there are no others."""
        table = webhook_events.c
        query = select(webhook_events).where(table.event_id > webhook.last_event_id, table.type.in_(webhook.types))
        if webhook.tenant_id is not None:
            query = query.where(table.tenant_id == webhook.tenant_id)
        async with self._database.read() as connection:
            last = select(counters.c.last).where(counters.c.name == "webhook_events")
            highest: int = (await connection.execute(last)).scalar_one()
            rows = (await connection.execute(query.order_by(table.event_id).limit(limit))).all()
        return rows, rows[-1].event_id if len(rows) == limit else highest

    async def forget_old(self) -> None:
        """Deletes events that are a month old. Raises ``Unavailable`` without SQL."""
        async with self._database.write() as connection:
            is_old = webhook_events.c.at_unix_us < now_unix_us() - _KEPT_US
            await connection.execute(delete(webhook_events).where(is_old))


def _one(webhook_id: Any) -> Any:
    return select(webhooks).where(webhooks.c.webhook_id == webhook_id)


def _webhook(row: Row[Any]) -> Webhook:
    return Webhook(
        row.webhook_id,
        row.tenant_id,
        row.url,
        row.secret,
        frozenset(json.loads(row.types)),
        row.created_unix_us,
        row.last_ledger_id,
        row.last_event_id,
        row.num_failures,
        row.next_unix_us,
        row.last_error,
    )
