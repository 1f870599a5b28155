"""The Admit streams of gateways, each with a bounded send queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from torchrelay.common.errors import Overloaded, TorchrelayError
from torchrelay.common.net.rpc.message_pace import EVERY_S, MessagePace
from torchrelay.control.v1.scheduler_pb2 import AdmitEvents

# Fields of an ``AdmitEvent``. There are thousands a second: the outgoing message is filled with fields directly, where
# it would have to copy an event.
EventFields: TypeAlias = dict[str, Any]
_BEAT: Any = {"beat": {}}
MAX_BATCH = 64  # events in one message
_MIN_BEAT_S = 0.1  # whatever a gateway asks for


class AdmitStream:
    """A gateway's stream. A gateway that reads too slowly loses the stream, not its admissions: it sends them again."""

    def __init__(self, max_queued: int, message_every_s: float) -> None:
        self._queue: deque[EventFields] = deque()
        self._max_queued = max_queued
        self._pace = MessagePace(message_every_s)
        self._changed = asyncio.Event()
        self._error: TorchrelayError | None = None
        self.is_closed = False
        self._beat_every_s: float | None = None
        self.gateway_id = ""  # known after its hello

    def send(self, event: EventFields) -> None:
        if len(self._queue) >= self._max_queued:
            self.close(Overloaded("the gateway reads its stream too slowly; open it again and repeat the admissions"))
            return
        self._queue.append(event)
        self._changed.set()

    def close(self, error: TorchrelayError | None = None) -> None:
        """Ends the stream; with ``error``, at once."""
        self.is_closed = True
        self._error = self._error or error
        self._changed.set()

    async def events(self) -> AsyncIterator[AdmitEvents]:
        """Yields sent events, and beats as often as the gateway asked for."""
        while True:
            while self._queue and self._error is None:
                if len(self._queue) < MAX_BATCH:
                    await self._pace.wait()
                num_events = min(len(self._queue), MAX_BATCH)
                batch: list[Any] = [self._queue.popleft() for _ in range(num_events)]  # fields are not in the stubs
                yield AdmitEvents(events=batch)
            if self._error is not None:
                raise self._error
            if self.is_closed:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(self._beat_every_s):
                    await self._changed.wait()
            except TimeoutError:
                yield AdmitEvents(events=[_BEAT])

    def beat(self, every_s: float) -> None:
        """Sends a beat this often from now on; 0: no beats."""
        if every_s > 0:
            self._beat_every_s = max(every_s, _MIN_BEAT_S)
            self.send(_BEAT)


class AdmitStreams:
    """The current stream of each gateway; a newer one replaces the older."""

    def __init__(self, max_queued: int, message_every_s: float = EVERY_S) -> None:
        self._max_queued, self._message_every_s = max_queued, message_every_s
        self._of: dict[str, AdmitStream] = {}

    def open(self) -> AdmitStream:
        return AdmitStream(self._max_queued, self._message_every_s)

    def connected(self, stream: AdmitStream, gateway_id: str) -> None:
        older = self._of.get(gateway_id)
        if older is not None and older is not stream:
            older.close()
        stream.gateway_id = gateway_id
        self._of[gateway_id] = stream

    def disconnected(self, stream: AdmitStream) -> bool:
        """True if this was the gateway's current stream."""
        if self._of.get(stream.gateway_id) is not stream:
            return False
        del self._of[stream.gateway_id]
        return True

    def send(self, gateway_id: str, event: EventFields) -> None:
        """Drops the event if the gateway is away: it asks again when it is back."""
        if stream := self._of.get(gateway_id):
            stream.send(event)

    def close(self) -> None:
        for stream in self._of.values():
            stream.close()
