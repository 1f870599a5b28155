"""Reads a stream, and breaks it when its peer hangs: gRPC keeps the connection of a stopped process for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from torchrelay.common.liveness import EngineProgress, Liveness
from torchrelay.control.v1 import types_pb2

WATCH_EVERY_S: Final = 0.25
_LOOP_STALL_S: Final = 1.0  # an event loop that stalled this long may have messages unread


@dataclass(slots=True)
class StreamReports:
    """Notes of a stream's reader for the watch. They are taken for every message, so they involve no clock."""

    num_messages: int = 0
    beat: types_pb2.EngineProgress | None = None  # the last one, until the watch reads it


async def read_watched(
    call: Any,
    write: Coroutine[Any, Any, None],
    take: Callable[[Any], None],
    reports: StreamReports,
    on_fault: Callable[[str], None],
) -> None:
    """Passes the messages of ``call`` to ``take`` until it ends, while ``write`` runs beside.

    When the peer hangs, ``on_fault`` gets the fault, and the call is cancelled.
    """

    async def break_if_hung() -> None:
        on_fault(await fault_of(reports))
        call.cancel()

    beside = [asyncio.ensure_future(write), asyncio.ensure_future(break_if_hung())]
    try:
        async for message in call:
            reports.num_messages += 1
            take(message)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


async def fault_of(reports: StreamReports) -> str:
    """Waits until the peer hangs. Returns how, as text that follows the peer's name."""
    clock = asyncio.get_running_loop().time
    num_messages, last = reports.num_messages, clock()
    liveness = Liveness(last)
    while not (fault := liveness.fault(last)):
        await asyncio.sleep(WATCH_EVERY_S)
        now = clock()
        if now - last > _LOOP_STALL_S:
            liveness.listening_since(now)
        last = now
        if reports.num_messages != num_messages:
            num_messages = reports.num_messages
            liveness.record_message(now)
        if reports.beat is not None:
            beat, reports.beat = reports.beat, None
            liveness.observe(EngineProgress(beat.num_advances, beat.has_work, beat.expected_s), now)
    return fault
