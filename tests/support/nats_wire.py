"""The reply of a NATS server to a command, by the wire protocol: a client library would tell of refusals only later."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from urllib.parse import urlsplit


async def refusal(url: str, command: str, user: str | None = None, password: str | None = None) -> str:
    """The server's complaint about ``command`` (without its line end), or about the user; empty: there is none."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        assert (await reader.readline()).startswith(b"INFO")
        hello = {"verbose": False, "lang": "python", "version": "0", "protocol": 1, "user": user, "pass": password}
        writer.write(f"CONNECT {json.dumps(hello)}\r\n{command}\r\nPING\r\n".encode())
        async with asyncio.timeout(20):
            while (line := await reader.readline()) not in (b"PONG\r\n", b""):  # answered in order
                if line.startswith(b"-ERR"):
                    return line.decode().strip()
        return ""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def publication(subject: str, payload: str = "forged") -> str:
    return f"PUB {subject} {len(payload)}\r\n{payload}"


def subscription(subject: str) -> str:
    return f"SUB {subject} 1"
