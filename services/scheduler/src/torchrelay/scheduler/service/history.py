"""The history of decisions and transitions on JetStream: published without blocking a decision, and read back."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import count
from typing import Any, NamedTuple

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from torchrelay.common.cancellation import cancellable, raise_if_cancelled
from torchrelay.common.errors import InvalidRequest, Overloaded, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1.scheduler_pb2 import Event
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.explain import unix_us

log = get_logger(__name__)

_RETRY_S = 0.2
_TIMEOUT_S = 2.0
_MAX_BATCH = 64  # events per batch, of which only the first and the last are acknowledged
_GATHER_S = 0.02  # how long events wait to be published with others

KINDS = ("relay", "instance", "scale", "copy", "store", "model", "budget")
MAX_READERS = 64
_BATCH = 100
_LATEST_US = 1 << 52  # in the year 2112
_EVENT_FIELDS = {"at_unix_us": int, "model": str, "reason": str}
_WAIT_S = 1.0  # for one event, before the next request
_INACTIVE_S = 30.0  # after which the broker removes an absent reader's consumer


class _QueuedEvent(NamedTuple):
    subject: str
    payload: bytes
    headers: dict[str, str]  # with an id, by which the stream drops duplicates


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
        headers = {"Nats-Msg-Id": f"{self._run_id}-{next(self._numbers)}"}
        self._queue.append(_QueuedEvent(subject, msgspec.json.encode(body), headers))
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


class EventReader:
    """Serves up to ``max_readers`` at once, each with its own consumer, which the broker removes when the reader
    leaves.
    """

    def __init__(self, js: JetStreamContext, subjects: Subjects, max_readers: int = MAX_READERS) -> None:
        self._js = js
        self._max_readers = max_readers
        self._subjects = subjects
        self._num_readers = 0

    async def events(
        self, kinds: Sequence[str], since_unix_us: int, after_sequence: int, follow: bool
    ) -> AsyncGenerator[Event, None]:
        """Events, oldest first, as defined by ``WatchEventsRequest``.

        Raises ``InvalidRequest``, ``Overloaded`` beyond ``max_readers``, or ``Unavailable`` without a broker.

        A batch is requested once the last batch is consumed, so a slow reader blocks nothing.
        """
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise InvalidRequest(f"{unknown[0]!r} is not an event kind: use {', '.join(KINDS)}", field="kinds")
        if not 0 <= since_unix_us <= _LATEST_US:
            raise InvalidRequest(f"{since_unix_us} is not a time in microseconds since 1970", field="since_unix_us")
        if not (since_unix_us or after_sequence or follow):
            return
        if self._num_readers >= self._max_readers:
            raise Overloaded(
                f"the history has {self._max_readers} readers already, the maximum; retry when one has ended"
            )
        self._num_readers += 1
        try:
            if not (since_unix_us or after_sequence):  # by number, so that a consumer made after a fault misses nothing
                after_sequence = (await self._js.stream_info(self._subjects.history_stream)).state.last_seq
            async with aclosing(self._messages(kinds, _start(since_unix_us, after_sequence), follow)) as messages:
                async for message in messages:
                    event = self._event(message)
                    if event is not None and (not kinds or event.kind.partition(".")[0] in kinds):
                        yield event
        except (nats.errors.Error, TimeoutError) as error:
            raise Unavailable("the history cannot be read: NATS does not respond; retry once it runs") from error
        finally:
            self._num_readers -= 1

    async def _messages(self, kinds: Sequence[str], start: ConsumerConfig, follow: bool) -> AsyncGenerator[Msg, None]:
        # A consumer filters by one subject; with more than one kind, the others are filtered out here.
        subject = self._subjects.event(f"{kinds[0]}.>" if len(kinds) == 1 else ">")
        while True:
            reader = await self._js.pull_subscribe(subject, stream=self._subjects.history_stream, config=start)
            try:
                num_pending = (await reader.consumer_info()).num_pending or 0
                while num_pending or follow:
                    raise_if_cancelled()  # the calls before may have swallowed it
                    try:
                        messages = await cancellable(reader.fetch(min(num_pending, _BATCH) or 1, timeout=_WAIT_S))
                    except nats.errors.TimeoutError:
                        if await _is_gone(reader):  # the broker restarted, or removed the consumer of a slow reader
                            log.info("history_consumer_gone", subject=subject)
                            break
                        if num_pending:
                            raise
                        continue  # nothing has happened
                    for message in messages:
                        num_pending = message.metadata.num_pending
                        start = _start(0, message.metadata.sequence.stream)
                        yield message
                else:
                    return
            finally:
                await reader.unsubscribe()

    def _event(self, message: Msg) -> Event | None:
        try:
            body: dict[str, Any] = json.loads(message.data)
            known = {name: body.pop(name, kind()) for name, kind in _EVENT_FIELDS.items()}
            return Event(
                sequence=message.metadata.sequence.stream,
                kind=message.subject.removeprefix(self._subjects.event("")),
                fields_json=json.dumps(body),
                **known,
            )
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("event_unreadable", subject=message.subject, error=str(error))
            return None


async def _is_gone(reader: JetStreamContext.PullSubscription) -> bool:
    try:
        await reader.consumer_info()
    except NotFoundError:
        return True
    return False


def _start(since_unix_us: int, after_sequence: int) -> ConsumerConfig:
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=_INACTIVE_S, mem_storage=True)
    if since_unix_us and not after_sequence:
        since = datetime.fromtimestamp(since_unix_us / 1e6, UTC)
        return config.evolve(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=since)
    return config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after_sequence + 1)
