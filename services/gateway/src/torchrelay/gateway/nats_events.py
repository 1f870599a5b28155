"""The gateway's NATS connection: key revocation hints, model history events, and access to usage registers.

No request depends on it, or waits for it: the connection is established in the background and re-established
indefinitely, and what is published is queued, within bounds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeAlias

import stamina
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from torchrelay.common.cancellation import raise_if_cancelled
from torchrelay.common.clock import now_unix_us
from torchrelay.common.net.nats_client import Subjects, connect, ensure_streams
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.billing.usage_register_reader import UsageRegisterReader
from torchrelay.gateway.core import PublishedModel

log = get_logger(__name__)
PUBLISH_TIMEOUT_S = 1.0
MAX_QUEUED = 1000


_Messages: TypeAlias = asyncio.Queue[tuple[str, bytes]]  # subject and payload


class NatsEvents:
    """Owns the NATS connection; ``run()`` keeps it until cancelled."""

    def __init__(
        self, url: str, prefix: str, gateway_id: str, on_key_hint: Callable[[], None], num_replicas: int = 1
    ) -> None:
        self._url, self._num_replicas = url, num_replicas
        self._gateway_id = gateway_id
        self._subjects = Subjects(prefix)
        self._on_key_hint = on_key_hint
        self._client: Client | None = None
        self._streams_made = False
        self._hints: _Messages = asyncio.Queue(MAX_QUEUED)
        self._events: _Messages = asyncio.Queue(MAX_QUEUED)

    def registers(self) -> UsageRegisterReader | None:
        """The reader of usage registers; ``None`` until the streams are known to exist."""
        if self._client is None or not self._streams_made:
            return None
        return UsageRegisterReader(self._client, self._subjects, self._num_replicas)

    async def run(self, retry_s: float = 1.0) -> None:
        """Connects and subscribes, then publishes until it is cancelled, and closes; events once they have streams."""
        retries = stamina.AsyncRetryingCaller(
            attempts=None, timeout=None, wait_initial=retry_s, wait_max=retry_s, wait_jitter=0
        )
        try:
            await retries((NatsError, OSError), self._connect)
            async with asyncio.TaskGroup() as publishing:
                publishing.create_task(self._publish_all(self._hints))  # which need no streams
                await retries((NatsError, OSError), self._make_streams)
                await self._publish_all(self._events)
        finally:
            if self._client is not None:
                await self._client.close()

    async def _connect(self) -> None:
        if self._client is None:
            self._client = await connect(self._url, self._gateway_id)
        await self._client.subscribe(self._subjects.key_hint, cb=self._key_hint)

    async def _make_streams(self) -> None:
        assert self._client is not None
        await ensure_streams(self._client.jetstream(), self._subjects, self._num_replicas)
        self._streams_made = True

    async def _publish_all(self, queued: _Messages) -> None:
        while True:
            await self._publish(*await queued.get(), is_durable=queued is self._events)
            raise_if_cancelled()

    async def ask(self) -> str:
        """The fault of NATS; empty if it answers."""
        if self._client is None or not self._client.is_connected:
            return "is not connected"
        try:
            await self._client.flush()
        except (NatsError, OSError):
            return "does not answer"
        return ""

    async def _key_hint(self, _message: Msg) -> None:
        self._on_key_hint()

    async def key_revoked(self) -> None:
        """Notifies the other gateways, best effort: without the hint they notice within half a second."""
        self._queue(self._hints, self._subjects.key_hint, b"{}")

    async def model_changed(self, kind: str, name: str, model: PublishedModel | None) -> None:
        """Publishes a history event; ``kind`` is "published" or "deleted"."""
        event = {"at_unix_us": now_unix_us(), "model": name}
        if model is not None:
            event |= {"version_id": model.version.served_version_id, "pack_id": model.version.pack_id}
            event |= {"pack_bytes": model.version.pack_bytes}
        self._queue(self._events, self._subjects.event(f"model.{kind}"), json.dumps(event).encode())

    async def budget_warned(self, tenant: str, sentence: str) -> None:
        """Publishes a history event about a budget."""
        event = {"at_unix_us": now_unix_us(), "model": tenant, "reason": sentence}
        self._queue(self._events, self._subjects.event("budget.warning"), json.dumps(event).encode())

    def _queue(self, queue: _Messages, subject: str, payload: bytes) -> None:
        if self._client is None or queue.full():
            log.warning("event_not_published", subject=subject, error="NATS is away")
        else:
            queue.put_nowait((subject, payload))

    async def _publish(self, subject: str, payload: bytes, *, is_durable: bool) -> None:
        client = self._client
        try:
            if client is None or not client.is_connected:
                log.warning("event_not_published", subject=subject, error="NATS is away")
            elif is_durable:
                await client.jetstream().publish(subject, payload, timeout=PUBLISH_TIMEOUT_S)
            else:
                await client.publish(subject, payload)
        except (NatsError, OSError) as error:
            log.warning("event_not_published", subject=subject, error=repr(error)[:200])
