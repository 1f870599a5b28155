"""Proxies Unix sockets, which are not bound to network namespaces, to addresses inside a lab.

    python unix_proxy.py SOCKET=HOST:PORT ...

Runs on a host of the lab. gRPC connects from its own threads, which cannot be moved into a namespace; through this
proxy its calls reach the lab from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

_READ_BYTES = 1 << 16


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _open(socket: str, host: str, port: int) -> asyncio.Server:
    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))

    return await asyncio.start_unix_server(join, socket)


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    servers = []
    for place in sys.argv[1:]:
        socket, _, address = place.partition("=")
        host, _, port = address.rpartition(":")
        servers.append(await _open(socket, host, int(port)))
    await asyncio.to_thread(Path(os.environ["TORCHRELAY_READY_FILE"]).write_text, json.dumps({"pid": os.getpid()}))
    await stop.wait()
    for server in servers:
        server.close()
    os._exit(0)  # open calls end with the process


if __name__ == "__main__":
    asyncio.run(main())
