"""uvicorn's HTTP protocol with limits of size, number and time, which it does not have.

A body that does not arrive in one piece with its head stays in the kernel until the application asks for it, so that
the gateway checks the key and the declared length before it reads any of the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httptools
import msgspec
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from torchrelay.gateway.edge.connection_table import ConnectionTable
from torchrelay.gateway.edge.lingering_close import LingeringSockets
from torchrelay.gateway.edge.read_limits import BodyProgress, ReadLimits
from torchrelay.gateway.edge.turns import ClientGroup, Turns
from torchrelay.gateway.openai.errors import body

LAST_REQUEST_S = 0.25  # for a request that is on its way when the server stops
MAX_PIPELINED = 4  # requests on one connection that wait for the answer to an earlier one
# Bytes discarded after an answer that was sent before the end of a body.
_TENANT_LINGER_BYTES, _KEYLESS_LINGER_BYTES = 8 << 20, 64 << 10


_VERSIONS_WITHOUT_CHUNKS = ("0.9", "1.0")  # of HTTP


class _Refused(Exception):
    """Ends the parsing; raised in a callback of the parser."""


GroupOf = Callable[[Mapping[str, Any]], ClientGroup | None]
GroupOfKey = Callable[[str], ClientGroup | None]


@dataclass(frozen=True, slots=True)
class Edge:
    """State that the connections of one server share."""

    table: ConnectionTable[asyncio.Transport]
    limits: ReadLimits
    stall_s: float  # after which a client that reads nothing of its answer is disconnected
    group_of: GroupOf  # the group that takes the turn of a request; None: it needs no turn
    group_of_key: GroupOfKey  # the group of an Authorization header, if it is known
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # the server accepts no more connections
    lingering: LingeringSockets = field(default_factory=LingeringSockets)
    first_reads: Turns = field(default_factory=Turns)
    first_reads_of_tenants: Turns = field(default_factory=Turns)
    requests: Turns = field(default_factory=Turns)


async def _send_unframed(cycle: RequestResponseCycle, send: Send, message: Message) -> None:
    """Sends a body as it is; the end of the connection ends it if its length was not declared."""
    cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP on one connection. The server calls ``check`` every ``CHECK_INTERVAL_S``."""

    def __init__(self, edge: Edge, **protocol_args: Any) -> None:
        super().__init__(**protocol_args)
        self._edge = edge
        self._limits = edge.limits
        self._is_lingering = False  # closes while the client may still be sending
        self._refusal: tuple[int, str] | None = None
        self._is_in_head = False  # between the first byte of a request and the end of its headers
        self.is_in_body = False
        self._head_since: float | None = None  # loop time since which the end of a head is awaited
        self._num_heads = 0  # complete ones
        self._num_head_bytes = 0  # raw bytes of the current head, while it is incomplete
        self._num_header_bytes = 0  # of the parsed headers
        self._head_without_offer = b""  # of a request that offers an upgrade, until it is parsed again
        self._num_headers = 0
        self._num_body_bytes = 0
        self._num_overhead_bytes = 0  # of a chunked body since its last byte of content
        self._turn: tuple[ClientGroup, Callable[[], None]] | None = None  # that the last request took, if it needed one
        self._progress = BodyProgress()
        self._checked_at = 0.0
        self._write_paused_at: float | None = None
        self._is_ending = False  # the server stops

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self._checked_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._turn is not None:
            self._edge.requests.withdraw(*self._turn)
            self._turn = None
        if self._is_lingering and exc is None:
            has_key = self._edge.table.has_key(self.transport)
            self._edge.lingering.begin(self.transport, _TENANT_LINGER_BYTES if has_key else _KEYLESS_LINGER_BYTES)
        self.scope = self.cycle = None  # type: ignore[assignment]  # break the reference cycle

    def data_received(self, data: bytes | memoryview) -> None:
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        num_heads, was_in_body, num_body_bytes = self._num_heads, self.is_in_body, self._num_body_bytes
        if not was_in_body and self._head_since is None:
            self._head_since = self.loop.time()
        try:
            self._parse(data)
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

    def _parse(self, data: bytes | memoryview) -> None:
        """Feeds the parser. It takes what follows an offer to upgrade for the other protocol, and httptools cannot make
        it read on, so a new parser reads the head again, without the offer.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_offer + bytes(data[upgrade.args[0] :])
                self._head_without_offer = b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's parser

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
        self.scope["state"]["show_key"] = partial(self._edge.table.show_key, self.transport)

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
        if self.parser.get_method() == b"CONNECT":
            self._refuse_by_parser(400, "the request is not valid HTTP for a server: CONNECT is a proxy's method")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts < 1 and self.parser.get_http_version() == "1.1"):
            self._refuse_by_parser(400, "a request of HTTP/1.1 must have one Host header")
        if self.parser.should_upgrade():
            line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            headers = (b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade")
            self._head_without_offer = b"\r\n".join([line, *headers, b"\r\n"])
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests were sent before the answer to an earlier one"
            self._refuse_by_parser(400, message)
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False
        self._is_in_head, self.is_in_body = False, True
        self._num_heads += 1
        self._edge.table.begin_request(self.transport)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] in _VERSIONS_WITHOUT_CHUNKS:
            cycle.chunked_encoding = False
            cycle.send = partial(_send_unframed, cycle, cycle.send)  # type: ignore[method-assign, arg-type]
        if (group := self._edge.group_of(cycle.scope)) is None:
            super()._start_asgi_task(cycle, app)
        else:
            self._turn = group, partial(super()._start_asgi_task, cycle, app)
            self._edge.requests.take(*self._turn)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._head_without_offer:
            return
        super().on_message_complete()
        self.is_in_body = False

    def _too_large_a_head(self) -> tuple[int, str]:
        maximum = f"{self._limits.head_bytes:,} bytes (setting max_head_bytes)"
        return 431, f"the request line and the headers are larger than {maximum}"

    def _refuse_by_parser(self, status: int, message: str) -> None:
        self._refusal = status, message
        raise _Refused(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answers unless another answer is under way, and closes the connection."""
        cycle = self.cycle
        is_answered = cycle is not None and not cycle.response_complete
        if not is_answered or (self.is_in_body and not cycle.response_started and not self.pipeline):
            encoded = msgspec.json.encode(body(status, message, code="invalid_request"))
            date = b"".join(b"%s: %s\r\n" % header for header in self.server_state.default_headers)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(encoded)
            self.transport.write(STATUS_LINE[status] + date + head + encoded)
        if is_answered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._is_lingering = True
        self.transport.close()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        if is_last and self.is_in_body:
            self._is_lingering = True
            self.transport.close()  # rather than read a body that the application did not ask for
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._edge.table.end_request(self.transport)
            if not self._is_in_head:  # an idle connection keeps nothing of its last request
                self.headers.clear()
                self.cycle.body = bytearray()
                self._turn = None

    def shutdown(self) -> None:
        """The server stops. A request that has begun, or begins within ``LAST_REQUEST_S``, is answered as the last."""
        self._is_ending = True
        if self._is_idle():
            self.loop.call_later(LAST_REQUEST_S, self._close_if_idle)
        elif self.cycle is not None and not self.cycle.response_complete:
            super().shutdown()

    def _is_idle(self) -> bool:
        return not self._is_in_head and (self.cycle is None or self.cycle.response_complete)

    def _close_if_idle(self) -> None:
        if self._is_idle():
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_paused_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_paused_at = None

    def check(self, now: float) -> None:
        """Closes the connection if its request arrives, or its answer is read, too slowly."""
        elapsed_s, self._checked_at = now - self._checked_at, now
        if self.transport.is_closing():
            return
        limits = self._limits
        if self._write_paused_at is not None and now - self._write_paused_at > self._edge.stall_s:
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
