"""Opens and settles requests in the ledger, in tasks that outlive them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from torchrelay.common.errors import Conflict, NotFound, TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.core import ChoiceUsage, LineResult, OpenedRequest, Reservation
from torchrelay.gateway.inference.interfaces import RequestLedger, RequestLimiter
from torchrelay.gateway.inference.model_labels import ModelLabels

log = get_logger(__name__)
T = TypeVar("T")
Opening: TypeAlias = asyncio.Task[TorchrelayError | None]  # the error that prevented the opened row's commit, or None
RETRY_S = (0.05, 0.2, 0.5, 1.0, 1.0, 1.0, 5.0)
RELEASE_RETRY_S = (1.1, 2.0, 4.0, 8.0, 15.0, 30.0)  # then the reservation is left to its lease
MAX_RELEASES = 4096  # waiting for a retry; further reservations are left to their leases


class RequestBill(Protocol):
    """The part of a ``LedgerWriter`` that a request needs."""

    def open(self, opened: OpenedRequest) -> Opening: ...

    def settle(
        self, opening: Opening, reservation: Reservation, request_id: str, model: str, usages: Sequence[ChoiceUsage], /
    ) -> asyncio.Future[None]: ...


@dataclass(frozen=True, slots=True)
class LinePart:
    """The use of a request of a batch's line, which is not billed yet."""

    opening: Opening
    reservation: Reservation
    request_id: str
    model: str
    usages: Sequence[ChoiceUsage]


class LedgerWriter:
    """Owns the writes; on exit it waits ``drain_s`` for them. The orphan sweep settles the rest.

    The release of a reservation that failed is retried in a task of its own, so no reply waits for Redis. On exit each
    such release is tried once more.
    """

    def __init__(
        self,
        ledger: RequestLedger,
        limits: RequestLimiter,
        drain_s: float,
        release_retry_s: Sequence[float] = RELEASE_RETRY_S,
        max_releases: int = MAX_RELEASES,
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._drain_s = drain_s
        self._release_retry_s = release_retry_s
        self._max_releases = max_releases
        self._tasks: set[asyncio.Task[Any]] = set()
        self._releases: set[asyncio.Task[Any]] = set()
        self._closes = asyncio.Event()
        self.labels = ModelLabels()
        self.billed_nano: Counter[str] = Counter()  # by label of the model, since the start

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._closes.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while left := self._tasks | self._releases:  # a settlement may leave a release
                    await asyncio.wait(left)
        left = self._tasks | self._releases
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    @property
    def num_waiting(self) -> int:
        """Writes not yet committed."""
        return len(self._tasks)

    def open(self, opened: OpenedRequest) -> Opening:
        """Writes the opened row."""
        return self._own(self._open(opened), self._tasks)

    def settle(
        self, opening: Opening, reservation: Reservation, request_id: str, model: str, usages: Sequence[ChoiceUsage]
    ) -> asyncio.Task[None]:
        """Bills the accepted usage once the opened row is committed, and ends the reservation."""
        return self._own(self._settle(opening, reservation, request_id, model, usages), self._tasks)

    def settle_line(self, result: LineResult, parts: Sequence[LinePart]) -> asyncio.Task[None]:
        """Keeps the result of a batch's line and bills its requests with it; only a success is billed.

        The task raises ``Conflict``, and nothing is billed, if the result is not kept.
        """
        return self._own(self._settle_line(result, parts), self._tasks)

    def _own(self, work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Conflict):  # which the owner of a line handles
            log.error("ledger_write_failed", exc_info=error)

    async def _open(self, opened: OpenedRequest) -> TorchrelayError | None:
        try:
            await self._ledger.open(opened)
        except TorchrelayError as error:
            return error
        except Exception:  # the request must end: it would wait for its row forever
            log.exception("opening_failed", request_id=opened.request_id)
            return TorchrelayError("internal error in the ledger; include the request id when reporting it")
        return None

    async def _settle(
        self, opening: Opening, reservation: Reservation, request_id: str, model: str, usages: Sequence[ChoiceUsage]
    ) -> None:
        if await opening is not None:
            # Nothing was delivered, so nothing is billed. It is settled nevertheless: if only the commit's answer was
            # lost, the row exists and the sweep would bill it later.
            usages = ()
        cost_nano = 0
        with suppress(NotFound):
            cost_nano = await self._retried(request_id, lambda: self._ledger.settle(request_id, usages))
        await self._end(reservation, model, cost_nano, usages)

    async def _settle_line(self, result: LineResult, parts: Sequence[LinePart]) -> None:
        errors = [await part.opening for part in parts]
        if result.status != 200 or any(errors):
            for part in parts:
                self.settle(part.opening, part.reservation, part.request_id, part.model, ())
            parts = ()
        cost_nano, usages = 0, [(part.request_id, part.usages) for part in parts]
        try:
            cost_nano = await self._retried(result.request_id, lambda: self._ledger.settle_line(result, usages))
        finally:
            for part in parts:  # of one model and tenant
                await self._end(part.reservation, part.model, cost_nano, part.usages)
                cost_nano = 0

    async def _retried(self, request_id: str, settle: Callable[[], Awaitable[int]]) -> int:
        """The cost, once committed. Raises ``NotFound`` and ``Conflict``."""
        # No retry library: stamina would cost 37 us on every request, and three outcomes must be told apart.
        num_failures = 0
        while True:
            try:
                return await settle()
            except (NotFound, Conflict):
                raise
            except TorchrelayError as error:
                log.warning("settlement_failed", request_id=request_id, why=error.message)
            except Exception:  # e.g. a deadlock; retried as long as the process lives
                log.exception("settlement_crashed", request_id=request_id)
            await asyncio.sleep(RETRY_S[min(num_failures, len(RETRY_S) - 1)])
            num_failures += 1

    async def _end(self, reservation: Reservation, model: str, cost_nano: int, usages: Sequence[ChoiceUsage]) -> None:
        """Ends the reservation of a settled request, and counts its cost."""
        self.billed_nano[self.labels.of(model)] += cost_nano
        num_tokens = max((each.num_prompt_tokens for each in usages), default=0)
        num_tokens += sum(each.num_output_tokens for each in usages)
        is_released = await self._limits.release(reservation, cost_nano, num_tokens)
        if not is_released and len(self._releases) < self._max_releases:
            self._own(self._release(reservation, cost_nano, num_tokens), self._releases)

    async def _release(self, reservation: Reservation, cost_nano: int, num_tokens: int) -> None:
        for delay_s in self._release_retry_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._closes.wait()
            if await self._limits.release(reservation, cost_nano, num_tokens) or self._closes.is_set():
                return
        log.warning("reservation_left_to_its_lease", reservation_id=reservation.reservation_id)
