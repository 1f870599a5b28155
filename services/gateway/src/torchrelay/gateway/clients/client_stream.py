"""Client-streaming calls, which the server may end while the client writes.

When a write fails, grpcio sets the status of the call to INTERNAL (grpc/grpc#36066). The status that the server sent
replaces that if it is processed later; processed earlier, it would be lost. So it ends the writing as it is processed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

T = TypeVar("T")


async def write_while_open(call: grpc.aio.StreamUnaryCall[Any, Any], writing: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``writing``, which writes to the call. None: the call has ended, and awaiting it says how."""
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
