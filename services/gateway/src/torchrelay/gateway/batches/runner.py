"""Runs batches: each gateway claims those that no living gateway has, and takes them from state to state (core.py).

All that a batch is, is in SQL and in the store, so a gateway that takes over only leaves out the lines with results.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import Conflict, NotFound, TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.recent import Recent
from torchrelay.gateway.background import repeat
from torchrelay.gateway.batches.core import Batch, BatchStatus
from torchrelay.gateway.batches.files import Files
from torchrelay.gateway.batches.line_call import RETRIED, BatchCatalog, LineAnswer, answer_of
from torchrelay.gateway.batches.lines import BatchLine, input_faults, line_of, numbered_lines
from torchrelay.gateway.batches.result_files import end_batch
from torchrelay.gateway.batches.table import Batches
from torchrelay.gateway.core import LineResult, Principal, ServiceClass
from torchrelay.gateway.exchange.asgi_app import TokenPathApp
from torchrelay.gateway.inference.execution.line_bill import LineBill
from torchrelay.gateway.inference.execution.running_request import AttemptsExhausted
from torchrelay.gateway.inference.pipeline import RequestPipeline
from torchrelay.gateway.limits.tenant_turns import TenantTurns

log = get_logger(__name__)
EVERY_S = 1.0  # between looks at the table
MAX_RUNNING, MAX_RUNNING_OF_TENANT = 64, 4  # batches of a gateway
MAX_PENDING_BYTES = 2 << 20  # of lines of a batch in memory, or a single line
FEW_LINES = 1  # of a batch at once, while other requests use its model
_WAY_S = 1.0  # after another request, until lines run as usual
_LOOK_S = 0.1  # between looks at the others
_MAX_VERSIONS = 1000
_MAX_EXHAUSTED = 3  # attempts at a line, each of which ended several workers
_ENDING_AT_ONCE = 2  # batches, whose results are in memory in part
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0  # before a line is tried again


class LineFailed(TorchrelayError):
    """A line that is not tried again."""

    code, http_status = "unavailable", 503


@dataclass(frozen=True, slots=True)
class LineLimits:
    at_once: int  # of a batch
    total_at_once: int  # of the gateway; half of them of a tenant
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class _Running:
    batch: Batch  # as it was claimed
    task: asyncio.Task[None]


class BatchRunner:
    """Runs this gateway's batches. ``principal_of``: the caller of a tenant's key id. Raises if it was revoked."""

    def __init__(
        self,
        batches: Batches,
        files: Files,
        apps: Mapping[str, TokenPathApp],
        pipeline: RequestPipeline,
        catalog: BatchCatalog,
        principal_of: Callable[[str], Awaitable[Principal]],
        gateway_id: str,
        limits: LineLimits,
    ) -> None:
        self._batches, self._files, self._apps, self._pipeline = batches, files, apps, pipeline
        self._catalog, self._principal_of, self._gateway_id, self._limits = catalog, principal_of, gateway_id, limits
        most = limits.total_at_once
        self._turns = TenantTurns(at_once=max(most // 2, 1), total_at_once=most)
        self._running: dict[str, _Running] = {}
        self._ending = asyncio.Semaphore(_ENDING_AT_ONCE)
        self._num_attempts = Counter[str]()  # of lines under way, by batch
        self._looked_at_s = float("-inf")
        self._others_ran_at_s: Recent[str, float] = Recent(_MAX_VERSIONS)  # by served version
        self._task: asyncio.Task[None] | None = None

    async def run(self, every_s: float = EVERY_S) -> None:
        """Runs batches until ``stop``; lines under way are then dropped, and run again elsewhere."""
        self._task = asyncio.current_task()
        async with asyncio.TaskGroup() as group:
            await repeat("batches", lambda: self._look(group), every_s)

    def stop(self) -> None:
        """Ends ``run``: before requests under way are waited for, of which it would begin more and more."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """Ends the tasks of batches that are not this gateway's any more or are cancelled; claims others."""
        open_batches = {batch.batch_id: batch for batch in await self._batches.claimable(self._gateway_id)}
        for batch_id, running in self._running.items():
            batch = open_batches.pop(batch_id, None)
            was_cancelled = batch is not None and batch.status is BatchStatus.CANCELLING is not running.batch.status
            if batch is None or was_cancelled:
                running.task.cancel()
        held = Counter(running.batch.tenant_id for running in self._running.values())
        while open_batches and len(self._running) < MAX_RUNNING:
            batch = min(open_batches.values(), key=lambda each: (held[each.tenant_id], each.created_unix_us))
            del open_batches[batch.batch_id]
            if held[batch.tenant_id] >= MAX_RUNNING_OF_TENANT:
                break
            if await self._batches.claim(batch, self._gateway_id):
                held[batch.tenant_id] += 1
                task = group.create_task(self._run_logged(batch), name=batch.batch_id)
                self._running[batch.batch_id] = _Running(batch, task)
                task.add_done_callback(lambda ended: self._running.pop(ended.get_name()))

    async def _run_logged(self, batch: Batch) -> None:
        """Runs the batch; after an error the next look begins it again."""
        try:
            await self._run(batch)
        except TorchrelayError as error:
            log.warning("batch_interrupted", batch_id=batch.batch_id, error=error.message)
        except Exception:
            log.exception("batch_crashed", batch_id=batch.batch_id)

    async def _run(self, batch: Batch) -> None:
        if batch.status is BatchStatus.VALIDATING and not await self._validate(batch):
            return
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            window = asyncio.timeout(max(batch.expires_unix_us - now_unix_us(), 0) / 1e6)
            try:
                async with window:
                    await self._run_lines(batch)
            except TimeoutError:
                if not window.expired():
                    raise
                log.info("batch_expired", batch_id=batch.batch_id)
            if not await self._batches.finalize(batch, self._gateway_id):
                return
        batch = await self._batches.find(None, batch.batch_id)
        async with self._ending:
            await end_batch(self._batches, self._files, batch, self._gateway_id, self._lines(batch))

    def _lines(self, batch: Batch) -> Callable[[], AsyncIterator[tuple[int, bytes]]]:
        async def lines() -> AsyncIterator[tuple[int, bytes]]:
            content = self._files.content(await self._files.find(batch.tenant_id, batch.input_file_id))
            async for numbered in numbered_lines(content, self._limits.max_body_bytes):
                yield numbered

        return lines

    async def _validate(self, batch: Batch) -> bool:
        """Begins the batch, or fails it: returns False then."""
        try:
            file = await self._files.find(batch.tenant_id, batch.input_file_id)
            content = self._files.content(file)
            num_lines, faults = await input_faults(content, batch.endpoint, self._limits.max_body_bytes)
        except NotFound as error:
            num_lines, faults = 0, [{"code": "invalid_file", "message": error.message, "param": None, "line": None}]
        if faults:
            await self._batches.fail(batch, self._gateway_id, faults, num_lines)
            return False
        return await self._batches.begin(batch, self._gateway_id, num_lines)

    async def _run_lines(self, batch: Batch) -> None:
        done = await self._batches.statuses(batch.batch_id)
        pending = _PendingLines(self._limits.at_once, MAX_PENDING_BYTES)
        try:
            async with asyncio.TaskGroup() as group:
                async for number, encoded in self._lines(batch)():
                    if number not in done:
                        await pending.take(len(encoded))
                        task = group.create_task(self._run_line(batch, number, line_of(encoded, batch.endpoint)))
                        task.add_done_callback(partial(pending.give_back, len(encoded)))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def _run_line(self, batch: Batch, number: int, line: BatchLine) -> None:
        """Tries the line until it has a result."""
        pause_s, num_exhausted = _FIRST_PAUSE_S, 0
        while True:
            try:
                await self._give_way(batch, line)
                async with self._turns.turn(batch.tenant_id):
                    self._num_attempts[batch.batch_id] += 1
                    try:
                        caller = await self._caller(batch, line)
                        if num_exhausted == _MAX_EXHAUSTED:  # it may be what ends the workers
                            caller = LineFailed("the workers that ran this line were lost each time")
                        await self._attempt(batch, number, line, caller)
                    finally:
                        self._num_attempts[batch.batch_id] -= 1
                return
            except RETRIED as error:
                num_exhausted += isinstance(error, AttemptsExhausted)
                log.info("line_retried", batch_id=batch.batch_id, line=number, why=error.message)
                wait_s = max(pause_s, error.retry_after_s or 0.0)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _give_way(self, batch: Batch, line: BatchLine) -> None:
        """Waits while other requests of this gateway use the line's model beside ``FEW_LINES`` of the batch.

        Lines that compute slow down each step of requests beside them. In the second half of its window a batch no
        longer waits: it must end.
        """
        version_id = await self._version_of(batch, line)
        half_us = (batch.created_unix_us + batch.expires_unix_us) // 2
        while self._num_attempts[batch.batch_id] >= FEW_LINES and now_unix_us() < half_us:
            self._look_at_others()
            if time.monotonic() - self._others_ran_at_s.get(version_id, float("-inf")) > _WAY_S:
                return
            await asyncio.sleep(_LOOK_S)

    def _look_at_others(self) -> None:
        """Notes the versions that other requests use: once for all lines that wait."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s < _LOOK_S / 2:
            return
        self._looked_at_s = now_s
        for each in self._pipeline.requests:
            if each.resolved.service_class is not ServiceClass.BATCH:
                self._others_ran_at_s[each.resolved.model.version.served_version_id] = now_s

    async def _version_of(self, batch: Batch, line: BatchLine) -> str:
        """The version whose instances serve the line; empty if there is none, which the line is told when it runs."""
        caller = await self._caller(batch, line)
        try:
            if isinstance(caller, TorchrelayError):
                return ""
            return (await self._catalog.resolve(caller, line.model)).version.served_version_id
        except TorchrelayError:
            return ""

    async def _attempt(self, batch: Batch, number: int, line: BatchLine, caller: Principal | TorchrelayError) -> None:
        """Raises ``RETRIED``, and bills nothing then."""
        bill = LineBill(self._pipeline.ledger_writer, batch.batch_id)
        remaining_s = max(batch.expires_unix_us - now_unix_us(), 1) / 1e6
        app = self._apps[batch.endpoint]
        app = app.with_pipeline(self._pipeline.for_line(self._catalog, bill, remaining_s))
        try:
            answer = await answer_of(app, caller, batch.endpoint, line.body)
            await bill.end(_result(batch, number, answer))
        except Conflict:
            if not await self._batches.results(batch.batch_id, number, number + 1):
                raise
            log.info("line_done_elsewhere", batch_id=batch.batch_id, line=number)
        finally:
            bill.drop()

    async def _caller(self, batch: Batch, line: BatchLine) -> Principal | TorchrelayError:
        """The caller of the line, or why it is refused."""
        try:
            line.check_is_whole()
            principal = await self._principal_of(batch.key_id)
            return replace(principal, service_class=ServiceClass.BATCH, top_class=ServiceClass.BATCH)
        except RETRIED:
            raise
        except TorchrelayError as error:
            return error


def _result(batch: Batch, number: int, answer: LineAnswer) -> LineResult:
    return LineResult(batch.batch_id, number, answer.request_id, answer.status, answer.body)


class _PendingLines:
    """The lines of a batch that are in memory, whose number and bytes are bounded."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._num_lines = self._num_bytes = 0
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Waits until the line is within the bounds; a single one always is."""
        while self._num_lines and (self._num_lines >= self._max_lines or self._num_bytes + num_bytes > self._max_bytes):
            self._freed.clear()
            await self._freed.wait()
        self._num_lines += 1
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int, _ended: asyncio.Task[None]) -> None:
        self._num_lines -= 1
        self._num_bytes -= num_bytes
        self._freed.set()
