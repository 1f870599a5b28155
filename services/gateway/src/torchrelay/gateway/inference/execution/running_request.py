"""The life of one request: admitted, placed, running, perhaps placed again, over.

One task (the door's) calls ``next`` until ``is_finished`` and then, whatever happened, ``close``. Streams, timers and
the ledger report by ``_hear``, which acts at once and never waits: a client that reads slowly holds back its own text,
not its workers' release. Only accepted tokens lie here until they are read, at most ``max_tokens`` per choice.
"""

from __future__ import annotations

import asyncio
import time

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import DeadlineExceeded, QueueFull, TorchrelayError, Unavailable
from torchrelay.common.process.telemetry import current_traceparent, get_logger
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import FinishCause, OpenedRequest, Reservation
from torchrelay.gateway.inference.core import (
    AdmissionFailed,
    ClientDisconnected,
    LedgerOpened,
    RequestEvent,
    RequestStopped,
    ResolvedRequest,
    TokenDelta,
    Usage,
    WorkerLost,
)
from torchrelay.gateway.inference.execution.attempt import Attempt, Upstreams
from torchrelay.gateway.inference.execution.generation import AttemptPlan, Generation, LogprobGeneration
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter
from torchrelay.gateway.inference.execution.notifier import Notifier

log = get_logger(__name__)

RETRIABLE_CODES = frozenset(
    {
        pb.RunError.CODE_WRONG_INSTANCE,
        pb.RunError.CODE_DECODE_LOST,
        pb.RunError.CODE_PREFILL_LOST,
        pb.RunError.CODE_LOAD_FAILED,
    }
)
FAILED_REASONS = frozenset({pb.FINISH_REASON_ERROR, pb.FINISH_REASON_CANCELLED})
SETTLE_TIMEOUT_S = 1.0  # how long a reply waits for its bill, so that usage read next includes it
FIRST_KEEP_ALIVE_S = 0.3  # a client that waits longer gets its headers


def retry_delay_s(num_attempts: int) -> float:
    """How long the next attempt waits: none the first time, then so that a cluster in motion can settle."""
    return 0.0 if num_attempts <= 2 else min(0.1 * 4 ** (num_attempts - 3), 2.0)


def refusal_error(refusal: scheduler_pb2.Refusal) -> TorchrelayError:
    """What the user is told when the scheduler says no."""
    message = refusal.message or "the request was refused"
    match refusal.reason:
        case scheduler_pb2.Refusal.REASON_QUEUE_FULL:
            return QueueFull(message, retry_after_s=refusal.retry_after_s or 1.0)
        case scheduler_pb2.Refusal.REASON_NO_CAPACITY:
            return Unavailable(message, field="model")
        case _:
            return Unavailable(message)


def run_error(error: pb.RunError) -> TorchrelayError:
    """What the user is told when a worker gives up for good."""
    message = error.message or "the worker could not go on with the request"
    if error.code == pb.RunError.CODE_INTERNAL:
        return TorchrelayError(message)
    if error.code == pb.RunError.CODE_DEADLINE:
        return DeadlineExceeded(message)
    return Unavailable(message)


class RunningRequest:
    """See the module. ``start`` sends it; ``close`` frees and settles whatever it holds, once, without waiting."""

    def __init__(
        self,
        resolved: ResolvedRequest,
        upstreams: Upstreams,
        ledger_writer: LedgerWriter,
        reservation: Reservation,
        *,
        max_attempts: int,
        keep_alive_s: float,
    ) -> None:
        self.resolved = resolved
        self._upstreams = upstreams
        self._ledger_writer = ledger_writer
        self._reservation = reservation
        self._max_attempts = max_attempts
        kind = LogprobGeneration if resolved.sampling.HasField("top_logprobs") else Generation
        self._generation = kind(resolved.num_choices, resolved.sampling.max_tokens)
        self._notifier = Notifier(FIRST_KEEP_ALIVE_S, keep_alive_s)
        self._attempts: dict[int, Attempt] = {}
        self._lost_workers: list[str] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._accepted: list[TokenDelta] = []  # not returned by ``next`` yet
        self._opening: asyncio.Task[TorchrelayError | None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._is_opened = False
        self._failure: TorchrelayError | ClientDisconnected | None = None
        self._traceparent = current_traceparent()
        self._started_at = time.monotonic()
        self.ttft_s: float | None = None  # until the first token was accepted

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended and ``next`` has returned all of it."""
        return self._generation.is_finished and not self._accepted

    @property
    def usage(self) -> Usage:
        return self._generation.usage(len(self.resolved.prompt))

    def start(self) -> None:
        """Opens the ledger's row and asks for a placement, both at once."""
        resolved = self.resolved
        self._opening = self._ledger_writer.open(
            OpenedRequest(
                request_id=resolved.request_id,
                tenant_id=resolved.principal.tenant_id,
                key_id=resolved.principal.key_id,
                model=resolved.model.name,
                version_id=resolved.model.version.version_id,
                price_id=resolved.model.price_id,
                num_prompt_tokens=len(resolved.prompt),
                max_tokens=resolved.sampling.max_tokens,
                num_choices=resolved.num_choices,
                gateway_id=self._upstreams.gateway_id,
                opened_unix_us=now_unix_us(),
            )
        )
        self._opening.add_done_callback(self._opened)
        if resolved.deadline_unix_us:
            left_s = (resolved.deadline_unix_us - now_unix_us()) / 1e6
            late = DeadlineExceeded("the request's time was over before it was done")
            self._timers.append(asyncio.get_running_loop().call_later(max(left_s, 0.0), self.stop, late))
        self._admit(self._generation.first())

    def _opened(self, opening: asyncio.Task[TorchrelayError | None]) -> None:
        self._on_event(LedgerOpened(Unavailable("the ledger was closed") if opening.cancelled() else opening.result()))

    def stop(self, error: TorchrelayError | None = None) -> None:
        """Makes ``next`` raise ``error``, or ``ClientLeft`` when there is none. Any task of the loop may call it."""
        self._on_event(RequestStopped(error))

    async def next(self) -> list[TokenDelta]:
        """The tokens accepted since the last call; empty after every keep-alive interval without any.

        Raises ``TorchrelayError`` when the request failed, ``ClientLeft`` when its client did. The opened row is
        committed before the first tokens are returned.
        """
        while True:
            if self._accepted and self._is_opened:
                deliveries, self._accepted = self._accepted, []
                return deliveries
            if self._failure is not None:
                raise self._failure
            if not await self._notifier.wait():
                return []

    async def pause(self, pause_s: float) -> None:
        """Waits so long for tokens to come together; no longer than until the last is there, or the request failed."""
        if self._failure is None and not self._generation.is_finished:
            await self._notifier.pause(pause_s)

    async def settled(self, timeout_s: float) -> None:
        """Waits a little for the bill of a finished request, so that who asks for usage next finds it there."""
        self.close()
        if self._settling is not None:
            await asyncio.wait({self._settling}, timeout=timeout_s)

    def close(self, unfinished: FinishCause = FinishCause.ERROR) -> None:
        """Stops and releases all that still runs, and settles what was accepted. Calling it again does nothing.

        ``unfinished`` is why choices that have not ended by themselves end here.
        """
        if self._opening is None or self._settling is not None:
            return
        self._notifier.close()
        self._free()
        usages = self._generation.settlement(self.resolved.request_id, len(self.resolved.prompt), unfinished)
        self._settling = self._ledger_writer.settle(self._opening, self._reservation, self.resolved.request_id, usages)

    def _free(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for attempt in self._attempts.values():
            attempt.end(is_running=True)
        self._attempts.clear()

    # -- what can happen ---------------------------------------------------------------------------------------------

    def _on_event(self, event: RequestEvent) -> None:
        if self._failure is not None or self._settling is not None:
            return
        try:
            if isinstance(event, pb.ChoiceOutput):
                self._output(event)
            else:
                self._handle(event)
        except (TorchrelayError, ClientDisconnected) as failure:
            self._failure = failure  # raised by ``next`` once what was accepted before it is delivered
            self._free()
            self._notifier.end_pause()
        if self._is_opened or self._failure is not None:  # else ``next`` has nothing to say yet, whatever was accepted
            self._notifier.notify()

    def _handle(self, event: RequestEvent) -> None:
        if isinstance(event, scheduler_pb2.Placement):
            attempt = self._attempts.get(event.key.attempt)
            if attempt is not None and attempt.placement is None:
                attempt.place(event, self._on_event)
        elif isinstance(event, scheduler_pb2.Refusal):
            self._refused(event)
        elif isinstance(event, WorkerLost):
            attempt = self._attempts.get(event.attempt)
            if attempt is not None and not attempt.survives_loss_of(event.worker_id):
                error = Unavailable(f"worker {event.worker_id} was lost")
                self._retry(event.attempt, error, event.worker_id)
        elif isinstance(event, AdmissionFailed):
            if event.attempt in self._attempts:
                raise event.error
        elif isinstance(event, LedgerOpened):
            if event.error is not None:
                raise event.error
            self._is_opened = True
        elif isinstance(event, RequestStopped):
            if event.error is not None:
                raise event.error
            raise ClientDisconnected

    def _output(self, output: pb.ChoiceOutput) -> None:
        number = output.key.attempt
        attempt = self._attempts.get(number)
        if attempt is None:
            return
        reason = output.finish_reason
        if reason and reason in FAILED_REASONS:
            self._failed(output)
            return
        delivery = self._generation.accept(output)
        if delivery is None:
            return
        if self.ttft_s is None:
            self.ttft_s = time.monotonic() - self._started_at
        attempt.note(output, len(delivery.token_ids))
        self._accepted.append(delivery)
        if delivery.finish is not None and self._generation.is_over(number):
            del self._attempts[number]
            attempt.end(is_running=False)
            if self._generation.is_finished:
                self._notifier.end_pause()
        elif not attempt.has_left_prefill and self._generation.has_prefilled(number):
            attempt.leave_prefill()

    def _failed(self, output: pb.ChoiceOutput) -> None:
        number, error = output.key.attempt, output.error
        if not self._generation.carries(number, output.choice):
            return
        if output.finish_reason == pb.FINISH_REASON_ERROR and error.code not in RETRIABLE_CODES:
            raise run_error(error)
        self._retry(number, run_error(error), error.lost_worker)

    def _refused(self, refusal: scheduler_pb2.Refusal) -> None:
        attempt = self._attempts.get(refusal.key.attempt)
        if attempt is None:
            return
        if attempt.placement is None:
            raise refusal_error(refusal)
        self._retry(refusal.key.attempt, refusal_error(refusal))  # the scheduler knows that its workers are gone

    def _retry(self, number: int, error: TorchrelayError, lost_worker: str = "") -> None:
        attempt = self._attempts.pop(number, None)
        if attempt is None:
            return
        if lost_worker and lost_worker not in self._lost_workers:
            self._lost_workers.append(lost_worker)
        attempt.end(is_running=True)
        for plan in self._generation.resume(number):
            num_attempts = self._generation.num_attempts(plan.attempt)
            if num_attempts > self._max_attempts:
                raise error
            log.info("request_resumed", request_id=self.resolved.request_id, attempt=plan.attempt, why=error.message)
            delay_s = retry_delay_s(num_attempts)
            if delay_s:
                self._timers.append(asyncio.get_running_loop().call_later(delay_s, self._admit, plan))
            else:
                self._admit(plan)

    def _admit(self, plan: AttemptPlan) -> None:
        attempt = Attempt(self.resolved, plan, self._upstreams, self._traceparent)
        self._attempts[plan.attempt] = attempt
        attempt.admit(self._lost_workers, self._on_event)
