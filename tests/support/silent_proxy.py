"""A TCP proxy that can fall silent: connections stay open and new ones are accepted, but nothing is passed on.

Clients of any server see what they see of a hung one, or of a network that drops every packet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class SilentProxy:
    """``url`` is the server's, by way of this proxy."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._parts = parts
        self._speaks = asyncio.Event()
        self._speaks.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def fall_silent(self) -> None:
        self._speaks.clear()

    def speak(self) -> None:
        """Passes on what was held back, too."""
        self._speaks.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[SilentProxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        user = self._parts.netloc.rpartition("@")
        self.url = self._parts._replace(netloc=f"{user[0]}{user[1]}127.0.0.1:{port}").geturl()
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._speaks.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            try:
                async with asyncio.TaskGroup() as both_ways:
                    both_ways.create_task(self._pass_on(reader, far_writer))
                    both_ways.create_task(self._pass_on(far_reader, writer))
            finally:
                far_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # it was closed at either end
        finally:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._speaks.wait()
                writer.write(data)
                await writer.drain()
            writer.close()
