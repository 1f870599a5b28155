"""The Admit streams of gateways: what is to be sent on each, bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from torchrelay.common.errors import Overloaded, TorchrelayError
from torchrelay.control.v1.scheduler_pb2 import AdmitEvent


class AdmitStream:
    """One stream. A gateway that reads too slowly loses the stream, not the admissions: it sends them again."""

    def __init__(self, max_queued: int) -> None:
        self._queue: deque[AdmitEvent] = deque()
        self._max_queued = max_queued
        self._news = asyncio.Event()
        self._error: TorchrelayError | None = None
        self._closed = False
        self.gateway_id = ""  # known after its hello

    def send(self, event: AdmitEvent) -> None:
        if len(self._queue) >= self._max_queued:
            self.close(Overloaded("The gateway reads its admissions too slowly; it may send them again."))
            return
        self._queue.append(event)
        self._news.set()

    def close(self, error: TorchrelayError | None = None) -> None:
        """Ends the stream; with ``error``, at once."""
        self._closed = True
        self._error = self._error or error
        self._news.set()

    async def events(self) -> AsyncIterator[AdmitEvent]:
        while True:
            while self._queue and self._error is None:
                yield self._queue.popleft()
            if self._error is not None:
                raise self._error
            if self._closed:
                return
            self._news.clear()
            await self._news.wait()


class AdmitStreams:
    """The present stream of each gateway; a newer one replaces the older."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._of: dict[str, AdmitStream] = {}

    def open(self) -> AdmitStream:
        return AdmitStream(self._max_queued)

    def arrived(self, stream: AdmitStream, gateway_id: str) -> None:
        older = self._of.get(gateway_id)
        if older is not None and older is not stream:
            older.close()
        stream.gateway_id = gateway_id
        self._of[gateway_id] = stream

    def left(self, stream: AdmitStream) -> bool:
        """True when this was the gateway's present stream."""
        if self._of.get(stream.gateway_id) is not stream:
            return False
        del self._of[stream.gateway_id]
        return True

    def send(self, gateway_id: str, event: AdmitEvent) -> None:
        """To a gateway that is away nothing is sent: it asks again when it is back."""
        if stream := self._of.get(gateway_id):
            stream.send(event)

    def close(self) -> None:
        for stream in self._of.values():
            stream.close()
