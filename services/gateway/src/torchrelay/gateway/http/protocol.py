"""uvicorn's HTTP protocol with limits of size, number and time, which it does not have.

A body that does not arrive in one piece with its head stays in the kernel until the application asks for it, so that
nothing of it is read before the key and the declared length have been looked at.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from torchrelay.gateway.http.connections import ConnectionTable
from torchrelay.gateway.http.lingering_close import LingeringSockets
from torchrelay.gateway.http.read_limits import BodyProgress, ReadLimits
from torchrelay.gateway.openai.errors import body

MAX_PIPELINED = 4  # requests on one connection that wait for the answer to an earlier one
_HEAD_READ_BYTES, _BODY_READ_BYTES = 16 << 10, 64 << 10
_BUFFER = memoryview(bytearray(_BODY_READ_BYTES))  # of all connections: what is read is parsed before the next read
# Thrown away after an answer that came before the end of a body.
_KNOWN_LINGER_BYTES, _KEYLESS_LINGER_BYTES = 8 << 20, 64 << 10


class _Refused(Exception):
    """Raised in a callback of the parser to end the parsing."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``check`` is called about once a second."""

    def __init__(
        self,
        table: ConnectionTable[BoundedProtocol],
        lingering: LingeringSockets,
        limits: ReadLimits,
        stall_s: float,
        **uvicorns: Any,
    ) -> None:
        super().__init__(**uvicorns)
        self._table = table
        self._lingering = lingering
        self._limits = limits
        self._stall_s = stall_s
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
        self._progress = BodyProgress()
        self._checked_at = 0.0
        self._write_paused_at: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self._checked_at = self.loop.time()
        if (victim := self._table.add(self, self.client[0] if self.client else "")) is not None:
            victim.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        has_key = self._table.has_key(self)
        self._table.remove(self)
        if self._is_lingering and exc is None:
            self._lingering.begin(self.transport, _KNOWN_LINGER_BYTES if has_key else _KEYLESS_LINGER_BYTES)
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
        self.scope["state"]["show_key"] = partial(self._table.show_key, self)

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
        self._table.begin_request(self)

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
            self._table.end_request(self)
            if not self._is_in_head:  # an idle connection keeps nothing of its last request
                self.headers.clear()
                self.cycle.body = bytearray()

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
        if self._write_paused_at is not None and now - self._write_paused_at > self._stall_s:
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


class BufferedReader(asyncio.BufferedProtocol):
    """Reads into one small buffer: otherwise the event loop takes up to 256 KB at once from each connection."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(transport)  # type: ignore[arg-type]  # a stream's, whose class uvloop keeps

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER if self._protocol.is_in_body else _BUFFER[:_HEAD_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(_BUFFER[:nbytes])

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
