"""Reads the history back from JetStream: since a time, and live."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from torchrelay.common.cancellation import cancellable, raise_if_cancelled
from torchrelay.common.errors import InvalidRequest, Overloaded, Unavailable
from torchrelay.common.net.nats_client import Subjects
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1.scheduler_pb2 import Event

log = get_logger(__name__)

KINDS = ("relay", "instance", "scale", "copy", "store", "model")
MAX_READERS = 64
_BATCH = 100
_LATEST_US = 1 << 52  # in the year 2112
FIRST_EVENT_US = 1
_WAIT_S = 1.0  # for one event, before the next request
_INACTIVE_S = 30.0  # after which the broker removes an absent reader's consumer
_AWAY = "the history cannot be read: NATS does not respond; retry once it runs"


class _ConsumerGone(Exception):
    """The broker restarted, or removed the consumer of a slow reader."""


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
            async with aclosing(self._messages(kinds, _start(since_unix_us, after_sequence), follow)) as messages:
                async for message in messages:
                    event = self._event(message)
                    if event is not None and (not kinds or event.kind.partition(".")[0] in kinds):
                        yield event
        except (nats.errors.Error, JetStreamError, TimeoutError) as error:
            raise Unavailable(_AWAY) from error
        finally:
            self._num_readers -= 1

    async def _messages(self, kinds: Sequence[str], start: ConsumerConfig, follow: bool) -> AsyncGenerator[Msg, None]:
        # A consumer filters by one subject; with more than one kind, the others are filtered out here.
        subject = self._subjects.event(f"{kinds[0]}.>" if len(kinds) == 1 else ">")
        if start.deliver_policy is DeliverPolicy.NEW:  # by number, so that a consumer made after a fault misses nothing
            state = (await self._js.stream_info(self._subjects.history_stream)).state
            start = _start(0, state.last_seq) if state.last_seq else _start(FIRST_EVENT_US, 0)
        while True:
            try:
                async with aclosing(self._read(subject, start, follow)) as messages:
                    async for message in messages:
                        start = _start(0, message.metadata.sequence.stream)
                        yield message
                return
            except _ConsumerGone:
                log.info("history_consumer_gone", subject=subject)

    async def _read(self, subject: str, start: ConsumerConfig, follow: bool) -> AsyncGenerator[Msg, None]:
        reader = await self._js.pull_subscribe(subject, stream=self._subjects.history_stream, config=start)
        try:
            num_pending = (await reader.consumer_info()).num_pending or 0
            while num_pending or follow:
                raise_if_cancelled()  # the calls before may have swallowed it
                try:
                    messages = await cancellable(reader.fetch(min(num_pending, _BATCH) or 1, timeout=_WAIT_S))
                except nats.errors.TimeoutError:
                    await _check_known(reader)
                    if num_pending:
                        raise
                    continue  # nothing has happened
                for message in messages:
                    num_pending = message.metadata.num_pending
                    yield message
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


_EVENT_FIELDS = {"at_unix_us": int, "model": str, "reason": str}


async def _check_known(reader: JetStreamContext.PullSubscription) -> None:
    """Raises ``_ConsumerGone`` if the consumer was removed: a fetch would only time out."""
    try:
        await reader.consumer_info()
    except NotFoundError as error:
        raise _ConsumerGone from error


def _start(since_unix_us: int, after_sequence: int) -> ConsumerConfig:
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=_INACTIVE_S, mem_storage=True)
    if after_sequence:
        return config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after_sequence + 1)
    if since_unix_us:
        since = datetime.fromtimestamp(since_unix_us / 1e6, UTC)
        return config.evolve(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=since)
    return config.evolve(deliver_policy=DeliverPolicy.NEW)
