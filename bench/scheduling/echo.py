"""A gRPC server whose streams answer each message with the same bytes.

    python -m bench.scheduling.echo

Writes its port as a line once it serves, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

SERVICE, METHOD = "torchrelay.bench.Echo", "Echo"


async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def serve() -> None:
    server = grpc.aio.server()
    handlers: dict[str, Any] = {METHOD: grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve())
