"""The history of decisions and transitions, published to JetStream without ever holding a decision up."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass

import nats.errors
from nats.js import JetStreamContext

from torchrelay.common.cancels import heeding
from torchrelay.common.events import Subjects
from torchrelay.common.ids import new_id
from torchrelay.common.telemetry import get_logger
from torchrelay.scheduler.effects import Happening
from torchrelay.scheduler.explain import micros

log = get_logger(__name__)

_RETRY_S = 0.2


@dataclass(frozen=True)
class _Event:
    subject: str
    payload: bytes
    message_id: str  # the stream drops a second copy


class History:
    """A bounded queue in front of the stream; while the broker is away the oldest events are dropped and counted."""

    def __init__(self, js: JetStreamContext, subjects: Subjects, max_queued: int = 4096) -> None:
        self._js = js
        self._subjects = subjects
        self._queue: deque[_Event] = deque()
        self._max_queued = max_queued
        self._filled = asyncio.Event()
        self.num_dropped = 0

    def note(self, happening: Happening) -> None:
        """Queues an event; those without a subject are for Explain only."""
        if not happening.event:
            return
        body: dict[str, object] = {
            "at_unix_us": micros(happening.at),
            "model": happening.model,
            "reason": happening.reason,
            **happening.fields,
        }
        if happening.brought:
            body["brought"] = happening.brought
        subject = self._subjects.event(happening.event)
        self._queue.append(_Event(subject, json.dumps(body).encode(), new_id("evt")))
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

    async def _publish(self, event: _Event) -> bool:
        try:
            message_id = {"Nats-Msg-Id": event.message_id}
            await heeding(self._js.publish(event.subject, event.payload, timeout=2, headers=message_id))
        except (nats.errors.Error, TimeoutError) as error:
            log.warning("history_publish_failed", subject=event.subject, error=str(error), dropped=self.num_dropped)
            return False
        return True
