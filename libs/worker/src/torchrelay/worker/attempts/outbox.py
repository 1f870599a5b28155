"""The outputs for one gateway, gathered until its stream can take them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2


class Outbox:
    """The outputs for one gateway's stream; each ``StepOutput`` carries all outputs since the last.

    A slow gateway gets larger messages, not more of them; ``max_tokens`` of its attempts bounds the total.
    """

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self._pending: list[pb.ChoiceOutput] = []
        self._beat: types_pb2.EngineProgress | None = None
        self._filled = asyncio.Event()

    def put(self, outputs: Iterable[pb.ChoiceOutput]) -> None:
        self._pending.extend(outputs)
        if self._pending:
            self._filled.set()

    def put_beat(self, progress: types_pb2.EngineProgress) -> None:
        """Puts a beat, in place of an earlier beat that is not sent yet."""
        self._beat = progress
        self._filled.set()

    async def take(self) -> pb.StepOutput:
        """Waits for an output or a beat, then takes everything."""
        await self._filled.wait()
        self._filled.clear()
        outputs, beat = self._pending, self._beat
        self._pending, self._beat = [], None
        return pb.StepOutput(outputs=outputs, beat=beat)
