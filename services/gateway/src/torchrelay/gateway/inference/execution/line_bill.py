"""The bill of an attempt at a line of a batch: its requests are billed together with its result, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from torchrelay.gateway.core import ChoiceUsage, LineResult, OpenedRequest, Reservation
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter, LinePart, Opening


class LineBill:
    """Takes the place of a ``LedgerWriter`` for the requests of the attempt. ``end`` or ``drop`` ends it."""

    def __init__(self, writer: LedgerWriter, batch_id: str) -> None:
        self._writer, self._batch_id = writer, batch_id
        self._parts: list[LinePart] = []

    def open(self, opened: OpenedRequest) -> Opening:
        return self._writer.open(replace(opened, batch_id=self._batch_id))

    def settle(
        self, opening: Opening, reservation: Reservation, request_id: str, model: str, usages: Sequence[ChoiceUsage]
    ) -> asyncio.Future[None]:
        """Notes the usage. The reply need not wait: the bill waits for the reply."""
        self._parts.append(LinePart(opening, reservation, request_id, model, usages))
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        settled.set_result(None)
        return settled

    async def end(self, result: LineResult) -> None:
        """Keeps the result and bills the requests, even if the caller leaves. Raises ``Conflict`` if it is not kept."""
        parts, self._parts = self._parts, []
        await asyncio.shield(self._writer.settle_line(result, parts))

    def drop(self) -> None:
        """Bills nothing: the attempt has no result. After ``end`` it does nothing."""
        while self._parts:
            part = self._parts.pop()
            self._writer.settle(part.opening, part.reservation, part.request_id, part.model, ())
