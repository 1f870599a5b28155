"""Publishes the history of decisions and transitions to JetStream, never blocking a decision."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import msgspec
import nats.errors
from nats.aio.client import Client

from torchrelay.common.cancellation import cancellable
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.explain import unix_us

log = get_logger(__name__)

_RETRY_S = 0.2
_TIMEOUT_S = 2.0
_MAX_BATCH = 64  # events per batch, of which only the first and the last are acknowledged
_GATHER_S = 0.02  # how long events wait to be published with others


@dataclass(frozen=True)
class _QueuedEvent:
    subject: str
    payload: bytes
    message_id: str  # the stream drops duplicates

    @property
    def headers(self) -> dict[str, str]:
        return {"Nats-Msg-Id": self.message_id}


class EventPublisher:
    """A bounded queue before the stream; while the broker is away, the oldest events are dropped and counted."""

    def __init__(self, nats: Client, subjects: Subjects, max_queued: int = 4096) -> None:
        self._nats, self._js = nats, nats.jetstream()
        self._subjects = subjects
        self._queue: deque[_QueuedEvent] = deque()
        self._max_queued = max_queued
        self._filled = asyncio.Event()
        self._run_id, self._numbers = new_id("evt"), count(1)
        self.num_dropped = 0

    def note(self, event: SchedulerEvent) -> None:
        """Queues an event; events without a topic are for Explain only."""
        if not event.topic:
            return
        body: dict[str, object] = {"at_unix_us": unix_us(event.at), "model": event.model}
        body |= {"reason": event.reason, **event.fields}
        if event.bytes_by_source:
            body["brought"] = event.bytes_by_source
        subject = self._subjects.event(event.topic)
        message_id = f"{self._run_id}-{next(self._numbers)}"
        self._queue.append(_QueuedEvent(subject, msgspec.json.encode(body), message_id))
        if len(self._queue) > self._max_queued:
            self._queue.popleft()
            self.num_dropped += 1
        self._filled.set()

    async def run(self) -> None:
        """Publishes in order until cancelled."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(_GATHER_S)
            self._filled.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), _MAX_BATCH))]
                try:
                    await cancellable(self._publish(batch))
                except (nats.errors.Error, TimeoutError) as error:
                    log.warning("history_publish_failed", num=len(batch), error=str(error), dropped=self.num_dropped)
                    num_free = max(self._max_queued - len(self._queue), 0)
                    self.num_dropped += max(len(batch) - num_free, 0)
                    self._queue.extendleft(reversed(batch[max(len(batch) - num_free, 0) :]))
                    await asyncio.sleep(_RETRY_S)

    async def _publish(self, batch: Sequence[_QueuedEvent]) -> None:
        """Publishes a batch with acknowledgements of the first and the last event only, because acknowledgements cost
        more than all the rest. The stream numbers its events: if the numbers of these two are as far apart as the
        batch is long, the stream has all events between them.
        """
        first, *between = batch
        begin = await self._store(first)
        if not between:
            return
        for event in between[:-1]:
            await self._nats.publish(event.subject, event.payload, headers=event.headers)
        if await self._store(between[-1]) - begin != len(between):  # others write to the stream: store each event again
            for event in between:
                await self._store(event)

    async def _store(self, event: _QueuedEvent) -> int:
        """Stores an event and returns its number in the stream, which is the same however often it is sent."""
        stored = await self._js.publish(event.subject, event.payload, timeout=_TIMEOUT_S, headers=event.headers)
        return stored.seq
