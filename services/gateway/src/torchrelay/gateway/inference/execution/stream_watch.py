"""Notices that the peer of a stream hangs. gRPC itself would wait for long: a stopped process keeps its connections."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from torchrelay.common.liveness import EngineProgress, Liveness
from torchrelay.control.v1 import types_pb2

WATCH_EVERY_S: Final = 0.25
_LOOP_STALL_S: Final = 1.0  # an event loop that stalled this long may have messages unread


@dataclass(slots=True)
class Heard:
    """What the reader of a stream notes for its watch. It does so for every message, so it looks at no clock."""

    num_messages: int = 0
    beat: types_pb2.EngineProgress | None = None  # the last one, until it is looked at


async def fault_of(heard: Heard) -> str:
    """Waits until the peer hangs; says how, to follow its name."""
    clock = asyncio.get_running_loop().time
    num_messages, last = heard.num_messages, clock()
    liveness = Liveness(last)
    while not (fault := liveness.fault(last)):
        await asyncio.sleep(WATCH_EVERY_S)
        now = clock()
        if now - last > _LOOP_STALL_S:
            liveness.listening_since(now)
        last = now
        if heard.num_messages != num_messages:
            num_messages = heard.num_messages
            liveness.heard(now)
        if heard.beat is not None:
            beat, heard.beat = heard.beat, None
            liveness.observe(EngineProgress(beat.num_advances, beat.has_work, beat.expected_s), now)
    return fault
