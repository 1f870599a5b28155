"""Publishes the history of decisions and transitions to JetStream, never blocking a decision."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass

import nats.errors
from nats.js import JetStreamContext

from torchrelay.common.cancellation import cancellable
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.explain import unix_us

log = get_logger(__name__)

_RETRY_S = 0.2


@dataclass(frozen=True)
class _QueuedEvent:
    subject: str
    payload: bytes
    message_id: str  # the stream drops duplicates


class EventPublisher:
    """A bounded queue before the stream; while the broker is away, the oldest events are dropped and counted."""

    def __init__(self, js: JetStreamContext, subjects: Subjects, max_queued: int = 4096) -> None:
        self._js = js
        self._subjects = subjects
        self._queue: deque[_QueuedEvent] = deque()
        self._max_queued = max_queued
        self._filled = asyncio.Event()
        self.num_dropped = 0

    def note(self, event: SchedulerEvent) -> None:
        """Queues an event; those without a topic are for Explain only."""
        if not event.topic:
            return
        body: dict[str, object] = {"at_unix_us": unix_us(event.at), "model": event.model}
        body |= {"reason": event.reason, **event.fields}
        if event.bytes_by_source:
            body["brought"] = event.bytes_by_source
        subject = self._subjects.event(event.topic)
        self._queue.append(_QueuedEvent(subject, json.dumps(body).encode(), new_id("evt")))
        if len(self._queue) > self._max_queued:
            self._queue.popleft()
            self.num_dropped += 1
        self._filled.set()

    async def run(self) -> None:
        """Publishes in order until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                event = self._queue.popleft()
                if not await self._publish(event):
                    self._queue.appendleft(event)
                    await asyncio.sleep(_RETRY_S)

    async def _publish(self, event: _QueuedEvent) -> bool:
        try:
            message_id = {"Nats-Msg-Id": event.message_id}
            await cancellable(self._js.publish(event.subject, event.payload, timeout=2, headers=message_id))
        except (nats.errors.Error, TimeoutError) as error:
            log.warning("history_publish_failed", subject=event.subject, error=str(error), dropped=self.num_dropped)
            return False
        return True
