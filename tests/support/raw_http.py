"""HTTP as any client may send it: bytes on a socket, in any order and at any pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.wait import HANG_S


@dataclass(frozen=True, slots=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        """The message of an error, which must have OpenAI's format."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["message"])


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Raises ``OSError`` when the other side has closed."""
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, timeout_s: float = HANG_S, *, has_body: bool = True) -> RawAnswer:
        """The next answer; that of a HEAD has no body, whatever length it declares.

        Raises ``asyncio.IncompleteReadError`` if the connection ends before it.
        """
        async with asyncio.timeout(timeout_s):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
            body = await self._reader.readexactly(int(headers.get("content-length", "0")) if has_body else 0)
            return RawAnswer(int(head[0].split()[1]), headers, body)

    async def wait_closed(self, timeout_s: float = HANG_S) -> None:
        """Until the server has closed; what it still sends is thrown away."""
        async with asyncio.timeout(timeout_s):
            try:
                while await self._reader.read(65536):
                    pass
            except ConnectionError:
                pass

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def raw_connection(port: int, host: str = "127.0.0.1") -> AsyncIterator[RawConnection]:
    connection = RawConnection(*await asyncio.open_connection(host, port))
    try:
        yield connection
    finally:
        connection.close()


def head(method: str = "GET", path: str = "/", **headers: str | int) -> bytes:
    """A request's head; underscores in the names of headers are dashes."""
    lines = [f"{method} {path} HTTP/1.1", "host: x", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
