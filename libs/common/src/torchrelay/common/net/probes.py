"""Probes: does a process answer in its own protocol? A hung process still accepts connections, but answers nothing.

Each probe keeps one connection open and asks over it, so that clients that take all other connections cannot make a
living process look dead. A probe has no time limit of its own: use a timeout.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from abc import ABC, abstractmethod
from typing import Any, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchrelay.common.net.rpc.health import fault_in


class Probe(Protocol):
    async def ask(self) -> str:
        """The fault, as the end of a sentence that begins with the process's name; empty if it answers."""

    async def close(self) -> None: ...


class GrpcProbe:
    """The standard gRPC health check, over a channel of the caller's."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._health: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack methods

    async def ask(self) -> str:
        call = self._health.Check(health_pb2.HealthCheckRequest())
        try:
            reply = await call
        except grpc.aio.AioRpcError:
            return "refuses connections"
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
        return f"cannot serve: {fault_in(await call.trailing_metadata()) or 'it does not say why'}"

    async def close(self) -> None:
        await self._channel.close()


class _StreamProbe(ABC):
    """Asks over a TCP or Unix connection."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> str:
        is_answered = False
        try:
            if self._stream is None:
                self._stream = await self._open()
                await self._greet(*self._stream)
            await self._exchange(*self._stream)
            is_answered = True
        except (OSError, EOFError, ValueError):
            return "refuses connections"
        finally:
            if not is_answered:
                await self.close()  # a late answer would be taken for the next one's
        return ""

    async def close(self) -> None:
        if self._stream is not None:
            self._stream[1].transport.abort()
            self._stream = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._url.hostname or "127.0.0.1", self._url.port)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Sends what the protocol requires before the first question on a new connection."""
        return

    @abstractmethod
    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A question and its answer. Raises ``EOFError`` or ``OSError`` when the connection ends."""


class HttpProbe(_StreamProbe):
    """``GET`` of a URL: any status is an answer."""

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"GET {self._url.path or '/'} HTTP/1.1\r\nHost: {self._url.netloc}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        _, _, length = head.partition(b"\r\ncontent-length:")
        await reader.readexactly(int(length.partition(b"\r\n")[0]))


class RedisProbe(_StreamProbe):
    """PING. An error is an answer too, of a Redis that is loading or busy with a script."""

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._url.scheme == "unix":
            return await asyncio.open_unix_connection(self._url.path)
        tls = ssl.create_default_context() if self._url.scheme == "rediss" else None
        return await asyncio.open_connection(self._url.hostname or "127.0.0.1", self._url.port or 6379, ssl=tls)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._url.password:
            user = [unquote(self._url.username)] if self._url.username else []
            await _redis_call(reader, writer, "AUTH", *user, unquote(self._url.password))

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _redis_call(reader, writer, "PING")


class NatsProbe(_StreamProbe):
    """PING, over a connection without TLS."""

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _line(reader)  # INFO
        hello = {"verbose": False, "pedantic": False, "name": "probe", **_nats_credentials(self._url)}
        writer.write(b"CONNECT " + json.dumps(hello).encode() + b"\r\n")

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"PING\r\n")
        while not (line := await _line(reader)).startswith((b"PONG", b"-ERR")):
            if line.startswith(b"PING"):  # it asks in turn, every two minutes
                writer.write(b"PONG\r\n")


async def _redis_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *words: str) -> None:
    encoded = [word.encode() for word in words]
    writer.write(b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded))
    await _line(reader)


async def _line(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\n")


def _nats_credentials(url: SplitResult) -> dict[str, str]:
    if url.username is None:
        return {}
    user = unquote(url.username)
    return {"auth_token": user} if url.password is None else {"user": user, "pass": unquote(url.password)}
