"""A gRPC client that breaks the rules: HTTP/2 frames written by hand on a socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tests.support.wait import HANG_S

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header_block(headers: Sequence[tuple[str, str]]) -> bytes:
    """HPACK without its table and without Huffman's code."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    encoded = text.encode("latin-1")
    return _length(len(encoded)) + encoded


def _length(value: int) -> bytes:
    if value < 127:
        return bytes([value])
    value, out = value - 127, bytearray([127])
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def call_headers(method: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "x"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]


class Http2Client:
    """Raises ``OSError`` where the server has closed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def greet(self, window: int = 65_535) -> None:
        """``window``: bytes of a call's answer that the server may send before it is told that they were read."""
        self.sock.sendall(PREFACE + frame(SETTINGS, payload=struct.pack(">HI", 4, window)))

    def widen(self, stream: int, num_bytes: int) -> None:
        """The window of a call."""
        self.sock.sendall(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes)))

    def send_message(self, stream: int, message: bytes) -> None:
        self.sock.sendall(frame(DATA, END_STREAM, stream, struct.pack(">BI", 0, len(message)) + message))

    def open_call(self, stream: int, method: str, *more: tuple[str, str]) -> None:
        """The metadata of a call, without its message."""
        self.sock.sendall(frame(HEADERS, END_HEADERS, stream, header_block(call_headers(method, *more))))

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """(kind, flags, stream, payload) until the server closes; settings and pings are answered."""
        while head := self._exactly(9):
            size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            payload = self._exactly(size)
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.sock.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            yield kind, flags, int.from_bytes(head[5:], "big"), payload

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.sock.recv(size - len(parts))
            if not part:
                return b""
            parts += part
        return bytes(parts)

    def end_of(self, stream: int) -> bytes:
        """The frames' payloads of a call up to its end; empty if the connection ended first."""
        return self.ends_of({stream})[stream]

    def ends_of(self, streams: set[int]) -> dict[int, bytes]:
        """The same of several calls."""
        told, is_open = dict.fromkeys(streams, b""), set(streams)
        try:
            for kind, flags, of, payload in self.frames():
                if of in is_open and kind in (DATA, HEADERS, CONTINUATION):
                    told[of] += payload
                if of in is_open and (kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM)):
                    told[of] = told[of] or b"reset"
                    is_open.remove(of)
                if not is_open:
                    return told
        except (BrokenPipeError, ConnectionResetError):
            pass
        return {**told, **dict.fromkeys(is_open, b"")}

    def is_closed(self, timeout_s: float) -> bool:
        """Whether the server closes within ``timeout_s``."""
        self.sock.settimeout(timeout_s)
        try:
            for _ in self.frames():
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True


@contextmanager
def http2_client(address: str, timeout_s: float = HANG_S) -> Iterator[Http2Client]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as sock:
        yield Http2Client(sock)
