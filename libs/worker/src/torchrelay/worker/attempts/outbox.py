"""Outputs for one gateway, gathered until its stream can take them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from torchrelay.control.v1 import generation_pb2 as pb


class Outbox:
    """Outputs for one gateway's stream; each ``StepOutput`` carries everything since the last.

    A slow gateway gets larger messages, not more of them; ``max_tokens`` of its attempts bounds the total.
    """

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self._pending: list[pb.ChoiceOutput] = []
        self._filled = asyncio.Event()

    def put(self, outputs: Iterable[pb.ChoiceOutput]) -> None:
        self._pending.extend(outputs)
        if self._pending:
            self._filled.set()

    async def take(self) -> pb.StepOutput:
        """Waits for an output, then takes all there are."""
        await self._filled.wait()
        self._filled.clear()
        outputs, self._pending = self._pending, []
        return pb.StepOutput(outputs=outputs)
