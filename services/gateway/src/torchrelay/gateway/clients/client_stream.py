"""Client-streaming calls, which the server may end while the client writes.

When a write fails, grpcio sets the status of the call to INTERNAL (grpc/grpc#36066). If the server's status is
processed later, it replaces INTERNAL; if it was processed before, it would be lost. So the server's status ends the
writing as soon as it is processed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

T = TypeVar("T")


async def write_while_open(call: grpc.aio.StreamUnaryCall[Any, Any], writing: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``writing``, which writes to the call. None if the call has ended; awaiting it gives its status."""
    task = asyncio.ensure_future(writing)

    def end(_: object) -> None:
        if asyncio.current_task() is not task:  # which ends by itself if its own write ended the call
            task.cancel()

    call.add_done_callback(end)
    await asyncio.gather(task, return_exceptions=True)
    try:
        return task.result()
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError, asyncio.CancelledError):
        if not call.done():
            raise
        return None
