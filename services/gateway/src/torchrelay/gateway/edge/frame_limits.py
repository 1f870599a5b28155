"""Limits of a client's HTTP/2 frames, which grpcio does not have, and the beginnings of its messages.

A frame that carries little costs the server as much as any other, and one of headers even more. Each is paid from an
allowance that grows with time and with what the server answers: calls are answered, and clients measure the bandwidth
and widen windows as they receive.

grpcio does not tell a call the number of its stream, so each call gets a header with it, in a frame of its own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torchrelay.gateway.edge.call_messages import CallMessages

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LAST_STREAM = (1 << 31) - 1
MAX_FRAME_BYTES = 16 << 10  # as the server's settings say
_DATA, _HEADERS, _SETTINGS, _PING, _CONTINUATION = 0, 1, 4, 6, 9
_END_STREAM, _END_HEADERS, _PADDED = 1, 4, 8
STREAM_HEADER = "torchrelay-stream"
_GO_AWAY, _ENHANCE_YOUR_CALM = 7, 11
_HEADER_BYTES = 9


def go_away(cause: str) -> bytes:
    """The frame that names the cause to a client whose connection ends; it marks no call as safe to repeat."""
    payload = struct.pack(">II", _LAST_STREAM, _ENHANCE_YOUR_CALM) + cause.encode()
    return _frame(_GO_AWAY, 0, 0, payload)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def _stream_header(stream: int) -> bytes:
    """The end of a header block, in HPACK without its table."""
    name, value = STREAM_HEADER.encode(), b"%d" % stream
    return _frame(_CONTINUATION, _END_HEADERS, stream, b"\0%c%s%c%s" % (len(name), name, len(value), value))


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """``header_block_bytes``: twice what grpcio refuses by name. ``small_data_bytes``: less makes a small frame."""

    allowance: int
    header_block_bytes: int = 32 << 10
    small_data_bytes: int = 64
    allowance_per_s: float = 100.0
    answer_bytes: int = 8  # earn an allowance of 1
    calls: int = 512  # of a connection whose messages are counted; beyond it, those of the oldest are not
    price: int = 1  # of a small frame, and of a message
    headers_price: int = 2  # of a frame of headers; above what is earned by the 13 bytes of a reset
    answered_price: int = 4  # of a ping or settings; above what is earned by the 17 bytes that the server answers with


class FrameCounter:
    """Counts the frames of a client, until it reports a fault. ``forwarded`` are the bytes for the server."""

    def __init__(self, now: float, limits: FrameLimits) -> None:
        self._limits = limits
        self.forwarded = bytearray()
        self._calls: dict[int, CallMessages] = {}  # by stream, the oldest first
        self._data: CallMessages | None = None  # of the current frame
        self._stream_header = b""  # that follows the current frame
        self._head = bytearray()  # of the frame that begins, or of the preface
        self._head_bytes = len(PREFACE)
        self._payload_bytes = 0  # of the current frame that are still to come
        self._block_bytes = 0  # of the header block that is open
        self._allowance, self._counted_at = float(limits.allowance), now
        self._answered_bytes = 0  # since then

    def answer(self, num_bytes: int) -> None:
        """Notes that the server has sent ``num_bytes``."""
        self._answered_bytes += num_bytes

    def messages(self, stream: int) -> CallMessages:
        """The messages of a call, until ``forget``."""
        if (messages := self._calls.get(stream)) is None:
            messages = self._calls[stream] = CallMessages()
            if len(self._calls) > self._limits.calls:
                self._calls.pop(next(iter(self._calls))).end()
        return messages

    def forget(self, stream: int) -> None:
        """Notes the end of a call. While the rest of a message may still arrive, its place in it stays known."""
        if (messages := self._calls.pop(stream, None)) is not None and messages.is_within:
            self._calls = {stream: messages} | self._calls  # evicted first

    def receive(self, data: bytes, now: float) -> str | None:
        """Checks ``data``, which the client has sent. Returns the exceeded limit as text, if any."""
        offset = 0
        while offset < len(data):
            if self._payload_bytes:
                part = data[offset : offset + self._payload_bytes]
                self._payload_bytes -= len(part)
                offset += len(part)
                self.forwarded += part
                num_begun = 0 if self._data is None else self._data.receive(part)
                if num_begun and (fault := self._pay(num_begun * self._limits.price, now)):
                    return fault
                if not self._payload_bytes:
                    self.forwarded += self._stream_header
                continue
            part = data[offset : offset + self._head_bytes - len(self._head)]
            self._head += part
            offset += len(part)
            if self._head_bytes != _HEADER_BYTES:
                if not PREFACE.startswith(self._head):
                    return "it is not HTTP/2"
                if len(self._head) == len(PREFACE):
                    self._head_bytes = _HEADER_BYTES
                    self.forwarded += self._head
                    self._head.clear()
            elif len(self._head) == _HEADER_BYTES:
                if fault := self._begin_frame(now):
                    return fault
                self.forwarded += self._head
                if not self._payload_bytes:
                    self.forwarded += self._stream_header
                self._head.clear()
        return None

    def _begin_frame(self, now: float) -> str | None:
        head, limits = self._head, self._limits
        size, kind = head[0] << 16 | head[1] << 8 | head[2], head[3]
        if size > MAX_FRAME_BYTES:
            return f"a frame is longer than {MAX_FRAME_BYTES:,} bytes"
        self._payload_bytes, self._stream_header, self._data = size, b"", None
        flags, stream = head[4], int.from_bytes(head[5:])
        if kind == _DATA:
            self._data = self.messages(stream)
        if (kind == _DATA and flags & (_END_STREAM | _PADDED)) or (kind == _HEADERS and flags & _END_STREAM):
            self.messages(stream).end()
        if kind in (_HEADERS, _CONTINUATION):
            self._block_bytes += _HEADER_BYTES + size
            if self._block_bytes > limits.header_block_bytes:
                return f"the headers of a call are longer than {limits.header_block_bytes:,} bytes"
            if flags & _END_HEADERS:
                self._block_bytes = 0
                head[4] -= _END_HEADERS  # the block ends with the stream's header
                self._stream_header = _stream_header(stream)
            return self._pay(limits.headers_price, now)
        if kind in (_SETTINGS, _PING):
            return self._pay(limits.answered_price, now)
        if kind != _DATA or size < limits.small_data_bytes:
            return self._pay(limits.price, now)
        return None

    def _pay(self, price: int, now: float) -> str | None:
        limits = self._limits
        earned = (now - self._counted_at) * limits.allowance_per_s + self._answered_bytes / limits.answer_bytes
        self._allowance = min(self._allowance + earned, limits.allowance) - price
        self._counted_at, self._answered_bytes = now, 0
        if self._allowance < 0:
            return "there are too many frames that carry nothing"
        return None
