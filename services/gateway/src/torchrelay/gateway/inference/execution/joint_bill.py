"""The bill of a call with several prompts: one row and one reservation, however many requests compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from torchrelay.gateway.core import ChoiceUsage, FinishCause, OpenedRequest, Reservation
from torchrelay.gateway.inference.execution.ledger_writer import Opening, RequestBill


class JointBill:
    """Takes the place of a ``LedgerWriter`` for a call's requests. ``end`` settles what they have used together."""

    def __init__(self, writer: RequestBill, request_id: str, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.reservation: Reservation | None = None  # once the call is admitted
        self._writer = writer
        self._request_id = request_id
        self._opening: Opening | None = None
        self._model = ""
        self._usages: list[ChoiceUsage] = []
        self._settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self, opened: OpenedRequest) -> Opening:
        """Writes the row of the call with its first request."""
        if self._opening is None:
            row = replace(opened, request_id=self._request_id, num_prompt_tokens=self.num_prompt_tokens)
            self._opening, self._model = self._writer.open(row), opened.model
        return self._opening

    def settle(
        self, _opening: Opening, _reservation: Reservation, _request_id: str, _model: str, usages: Sequence[ChoiceUsage]
    ) -> asyncio.Future[None]:
        self._usages += usages
        return self._settled

    def end(self) -> None:
        """Settles the call, whose requests are closed. It bills nothing if one of them has failed."""
        if self._opening is None or self.reservation is None:
            return
        causes = {usage.cause for usage in self._usages}
        cause = next((each for each in (FinishCause.ERROR, FinishCause.CANCELLED) if each in causes), FinishCause.STOP)
        billed = () if cause is FinishCause.ERROR else self._usages
        usage = ChoiceUsage(
            self._request_id,
            choice=0,
            num_prompt_tokens=sum(each.num_prompt_tokens for each in billed),
            num_cached_prompt_tokens=sum(each.num_cached_prompt_tokens for each in billed),
            num_output_tokens=0,
            cause=cause,
        )
        settling = self._writer.settle(self._opening, self.reservation, self._request_id, self._model, [usage])
        settling.add_done_callback(lambda _: self._settled.set_result(None))

    async def settled(self, timeout_s: float) -> None:
        """Waits for the settlement."""
        await asyncio.wait({self._settled}, timeout=timeout_s)
