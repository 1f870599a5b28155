"""uvicorn's HTTP protocol with limits of size, number and time, which it does not have.

A body that does not arrive in one piece with its head stays in the kernel until the application asks for it, so that
nothing of it is read before the key and the declared length have been looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from torchrelay.gateway.http.connections import ConnectionTable
from torchrelay.gateway.http.lingering_close import LingeringSockets
from torchrelay.gateway.http.read_limits import BodyProgress, ReadLimits
from torchrelay.gateway.http.turns import Lane, Turns
from torchrelay.gateway.openai.errors import body

MAX_PIPELINED = 4  # requests on one connection that wait for the answer to an earlier one
# Thrown away after an answer that came before the end of a body.
_KNOWN_LINGER_BYTES, _KEYLESS_LINGER_BYTES = 8 << 20, 64 << 10


class _Refused(Exception):
    """Raised in a callback of the parser to end the parsing."""


LaneOf = Callable[[Mapping[str, Any]], Lane | None]
LaneOfKey = Callable[[str], Lane | None]


@dataclass(frozen=True, slots=True)
class Door:
    """What the connections of one server share.

    ``stall_s``: of a client that takes nothing of its answer. ``lane_of``: who takes the turn of a request; None: it
    needs none. ``lane_of_key``: whose an Authorization header is, as far as that is known.
    """

    table: ConnectionTable[asyncio.Transport]
    lingering: LingeringSockets
    limits: ReadLimits
    stall_s: float
    lane_of: LaneOf
    lane_of_key: LaneOfKey
    first_reads: Turns
    first_reads_of_tenants: Turns
    requests: Turns


class BoundedProtocol(HttpToolsProtocol):
    """HTTP of one connection. ``check`` is called about once a second."""

    def __init__(self, door: Door, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._door = door
        self._limits = door.limits
        self._is_lingering = False  # closes while the client may still be sending
        self._refusal: tuple[int, str] | None = None
        self._is_in_head = False  # between the first byte of a request and the end of its headers
        self.is_in_body = False
        self._head_since: float | None = None  # waiting for the end of a head since this time of the loop
        self._num_heads = 0  # complete ones
        self._num_head_bytes = 0  # raw bytes of the current head, while it is incomplete
        self._num_header_bytes = 0  # of the headers that are parsed
        self._num_headers = 0
        self._num_body_bytes = 0
        self._num_overhead_bytes = 0  # of a chunked body since its last byte of content
        self._turn: tuple[Lane, Callable[[], None]] | None = None  # of the last request that needed one
        self._progress = BodyProgress()
        self._checked_at = 0.0
        self._write_paused_at: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self._checked_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._turn is not None:
            self._door.requests.give_up(*self._turn)
            self._turn = None
        if self._is_lingering and exc is None:
            has_key = self._door.table.has_key(self.transport)
            self._door.lingering.begin(self.transport, _KNOWN_LINGER_BYTES if has_key else _KEYLESS_LINGER_BYTES)
        self.scope = self.cycle = None  # type: ignore[assignment]  # they refer back to this protocol

    def data_received(self, data: bytes | memoryview) -> None:
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        num_heads, was_in_body, num_body_bytes = self._num_heads, self.is_in_body, self._num_body_bytes
        if not was_in_body and self._head_since is None:
            self._head_since = self.loop.time()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no upgrade is supported; the request is answered as it is
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (400, "the request is not valid HTTP")))
            return
        if self._is_in_head:
            if was_in_body or num_heads != self._num_heads:  # the head began within ``data``
                self._head_since, self._num_head_bytes = self.loop.time(), 0
            else:
                self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.head_bytes:
                self._refuse(*self._too_large_a_head())
        elif self.is_in_body:
            if num_heads != self._num_heads:
                self._begin_body()
            elif num_body_bytes == self._num_body_bytes:
                self._num_overhead_bytes += len(data)
                if self._num_overhead_bytes > self._limits.head_bytes:
                    self._refuse(400, "the chunks of the body carry too many bytes that are no content")
            else:
                self._num_overhead_bytes = 0
        elif num_heads != self._num_heads:
            self._head_since = None

    def _begin_body(self) -> None:
        self._head_since = None
        self._num_overhead_bytes = 0
        self._progress = BodyProgress(self._num_body_bytes)
        self._checked_at = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self.flow.pause_reading()  # until the application asks for the body

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self.is_in_body = True, False
        self._num_headers = self._num_header_bytes = self._num_body_bytes = 0
        self.scope["state"]["show_key"] = partial(self._door.table.show_key, self.transport)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.url_bytes:
            message = f"the URL is longer than {self._limits.url_bytes:,} bytes (setting max_url_bytes)"
            self._refuse_by_parser(414, message)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + 4  # with ": " and the end of the line
        if self._num_headers > self._limits.num_headers:
            self._refuse_by_parser(431, f"there are more than {self._limits.num_headers} headers (setting max_headers)")
        if len(self.url) + self._num_header_bytes > self._limits.head_bytes:
            self._refuse_by_parser(*self._too_large_a_head())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests were sent before the answer to an earlier one"
            self._refuse_by_parser(400, message)
        super().on_headers_complete()
        self._is_in_head, self.is_in_body = False, True
        self._num_heads += 1
        self._door.table.begin_request(self.transport)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if (lane := self._door.lane_of(cycle.scope)) is None:
            super()._start_asgi_task(cycle, app)
        else:
            self._turn = lane, partial(super()._start_asgi_task, cycle, app)
            self._door.requests.take(*self._turn)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.is_in_body = False

    def _too_large_a_head(self) -> tuple[int, str]:
        maximum = f"{self._limits.head_bytes:,} bytes (setting max_head_bytes)"
        return 431, f"the request line and the headers are larger than {maximum}"

    def _refuse_by_parser(self, status: int, message: str) -> None:
        self._refusal = status, message
        raise _Refused(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answers, if no other answer is under way, and closes."""
        cycle = self.cycle
        is_answered = cycle is not None and not cycle.response_complete
        if not is_answered or (self.is_in_body and not cycle.response_started and not self.pipeline):
            encoded = msgspec.json.encode(body(status, message, code="invalid_request"))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(encoded)
            self.transport.write(STATUS_LINE[status] + head + encoded)
        if is_answered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._is_lingering = True
        self.transport.close()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        if is_last and self.is_in_body:
            self._is_lingering = True
            self.transport.close()  # rather than read a body that nobody asked for
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._door.table.end_request(self.transport)
            if not self._is_in_head:  # an idle connection keeps nothing of its last request
                self.headers.clear()
                self.cycle.body = bytearray()
                self._turn = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_paused_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_paused_at = None

    def check(self, now: float) -> None:
        """Ends the connection if its request arrives too slowly or its answer is taken too slowly."""
        elapsed_s, self._checked_at = now - self._checked_at, now
        if self.transport.is_closing():
            return
        limits = self._limits
        if self._write_paused_at is not None and now - self._write_paused_at > self._door.stall_s:
            self.transport.abort()
        elif self._head_since is not None:
            if now - self._head_since < limits.head_s:
                return
            if self._is_in_head:
                self._refuse(408, f"the headers did not end within {limits.head_s:g} s (setting head_timeout_s)")
            else:
                self.transport.close()
        elif self.is_in_body and not self.flow.read_paused:
            self._progress = self._progress.after(elapsed_s, self._num_body_bytes)
            if (fault := self._progress.fault(limits)) is not None:
                self._refuse(408, fault)
