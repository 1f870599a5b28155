"""The lifecycle of one request: admitted, placed, running, possibly placed again, finished.

One task (the protocol's) calls ``next`` until ``is_finished`` and then, in any case, ``close``. Streams, timers and the
ledger report to ``_on_event``, which acts at once and never waits: a slow reader delays its own text, not the release
of its workers. Only accepted tokens are buffered here, at most ``max_tokens`` per choice.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import DeadlineExceeded, InvalidRequest, QueueFull, TorchrelayError, Unavailable
from torchrelay.common.process.telemetry import current_traceparent, get_logger
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import FinishCause, OpenedRequest, Reservation
from torchrelay.gateway.inference.core import (
    AdmissionFailed,
    ClientDisconnected,
    RequestEvent,
    ResolvedRequest,
    TokenDelta,
    Usage,
    WorkerLost,
)
from torchrelay.gateway.inference.execution.attempt import Attempt, Upstreams
from torchrelay.gateway.inference.execution.generation import (
    AttemptPlan,
    EmbeddingGeneration,
    Generation,
    LogprobGeneration,
)
from torchrelay.gateway.inference.execution.ledger_writer import Opening, RequestBill
from torchrelay.gateway.inference.execution.notifier import Notifier
from torchrelay.gateway.inference.execution.prompt_scores import PromptScores

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
FIRST_KEEP_ALIVE_S = 0.3  # then a waiting client gets its headers
LOADING_KEEP_ALIVE_S = 1.0  # at most, while its model loads


class AttemptsExhausted(Unavailable):
    """Says that a request has failed on as many workers as it may try."""


def retry_delay_s(num_attempts: int) -> float:
    """The delay of the next attempt: none at first, then growing, so that a changing cluster can settle."""
    return 0.0 if num_attempts <= 2 else min(0.1 * 4 ** (num_attempts - 3), 2.0)


def refusal_error(refusal: scheduler_pb2.Refusal) -> TorchrelayError:
    """The user's error for a refusal by the scheduler."""
    message, retry_after_s = refusal.message or "the request was refused", refusal.retry_after_s or None
    match refusal.reason:
        case scheduler_pb2.Refusal.REASON_QUEUE_FULL:
            return QueueFull(message, retry_after_s=retry_after_s or 1.0)
        case scheduler_pb2.Refusal.REASON_NO_CAPACITY | scheduler_pb2.Refusal.REASON_TOO_LONG:
            return Unavailable(message, field="model", retry_after_s=retry_after_s)
        case _:
            return Unavailable(message, retry_after_s=retry_after_s)


def run_error(error: pb.RunError, format_field: str = "response_format") -> TorchrelayError:
    """The user's error for a worker's final failure; ``format_field`` of the request has the answer's format."""
    message = error.message or "the worker failed to continue the request"
    if error.code == pb.RunError.CODE_INTERNAL:
        return TorchrelayError(message)
    if error.code == pb.RunError.CODE_FORMAT:
        return InvalidRequest(message, field=format_field)
    if error.code == pb.RunError.CODE_DEADLINE:
        return DeadlineExceeded(message)
    return Unavailable(message)


def generation_of(resolved: ResolvedRequest) -> Generation:
    """The state of a request that has just begun."""
    if resolved.pooling:
        return EmbeddingGeneration()
    kind = LogprobGeneration if resolved.sampling.HasField("top_logprobs") else Generation
    return kind(resolved.num_choices, resolved.sampling.max_tokens)


class RunningRequest:
    """A request under way. ``start`` admits it; ``close`` frees and settles it, once, without waiting."""

    def __init__(
        self,
        resolved: ResolvedRequest,
        upstreams: Upstreams,
        bill: RequestBill,
        reservation: Reservation,
        *,
        max_attempts: int,
        keep_alive_s: float,
    ) -> None:
        self.resolved = resolved
        self._upstreams = upstreams
        self._bill = bill
        self._reservation = reservation
        self._max_attempts = max_attempts
        self._generation = generation_of(resolved)
        asks = resolved.sampling.HasField("prompt_logprobs")
        self.prompt_scores = PromptScores(len(resolved.prompt)) if asks else None
        self._keep_alive_s = keep_alive_s
        self._notifier = Notifier(FIRST_KEEP_ALIVE_S, self._next_keep_alive_s)
        self._attempts: dict[int, Attempt] = {}
        self._lost_workers: list[str] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._accepted: list[TokenDelta] = []  # not yet returned by ``next``
        self._opening: Opening | None = None
        self._settling: asyncio.Future[None] | None = None
        self._is_opened = False
        self._failure: TorchrelayError | ClientDisconnected | None = None
        self._traceparent = current_traceparent()
        self._arrived_at = time.monotonic() - max(now_unix_us() - resolved.arrived_unix_us, 0) / 1e6
        self.ttft_s: float | None = None  # from its arrival until the first token was accepted
        self._generated_s: float | None = None  # from its arrival until the last token was accepted
        self.is_read_whole = False  # its caller gets the answer as a whole, after its last token
        self._num_returned = 0  # tokens that ``next`` has returned
        self.num_recomputed: Counter[str] = Counter()  # tokens of failed ("lost") and "moved" attempts

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended and ``next`` has returned everything."""
        return self._generation.is_finished and not self._accepted

    @property
    def usage(self) -> Usage:
        return self._generation.usage(len(self.resolved.prompt))

    @property
    def num_undelivered(self) -> int:
        """Tokens that were computed for a request that ends now without success, and do not reach its caller; if none
        of its answer does, its prompt counts, too.
        """
        usage, num_reached = self.usage, 0 if self.is_read_whole else self._num_returned
        if num_reached or self.ttft_s is None:
            return usage.num_output_tokens - num_reached
        return usage.num_prompt_tokens - usage.num_cached_prompt_tokens + usage.num_output_tokens

    @property
    def tbt_s(self) -> float | None:
        """Mean time between the tokens of a complete answer, where its choices have several tokens."""
        num_steps = self.usage.num_output_tokens / self.resolved.num_choices - 1
        if self.ttft_s is None or self._generated_s is None or num_steps <= 0:
            return None
        return (self._generated_s - self.ttft_s) / num_steps

    @property
    def causes(self) -> list[str]:
        """Why each finished choice ended."""
        return [progress.finish.value for progress in self._generation.choices if progress.finish is not None]

    @property
    def waits_for(self) -> str:
        """A line for the client about what the request waits for."""
        if self.ttft_s is not None:
            return "waiting"
        model = self.resolved.model
        return self._upstreams.admissions.load_text(model.version.served_version_id, model.name) or "waiting"

    def _next_keep_alive_s(self) -> float:
        is_loading = self.waits_for != "waiting"
        return min(self._keep_alive_s, LOADING_KEEP_ALIVE_S) if is_loading else self._keep_alive_s

    def start(self) -> None:
        """Opens the ledger row and requests a placement, concurrently."""
        resolved = self.resolved
        self._opening = self._bill.open(
            OpenedRequest(
                request_id=resolved.request_id,
                tenant_id=resolved.principal.tenant_id,
                key_id=resolved.principal.key_id,
                model=resolved.model.name,
                version_id=resolved.model.version.version_id,
                price_id=resolved.model.price.price_id,
                num_prompt_tokens=len(resolved.prompt),
                max_tokens=resolved.sampling.max_tokens,
                num_choices=resolved.num_choices,
                gateway_id=self._upstreams.gateway_id,
                opened_unix_us=resolved.arrived_unix_us,
            )
        )
        self._opening.add_done_callback(self._opened)
        if resolved.deadline_unix_us:
            remaining_s = (resolved.deadline_unix_us - now_unix_us()) / 1e6
            error = DeadlineExceeded("the request exceeded its deadline")
            self._timers.append(asyncio.get_running_loop().call_later(max(remaining_s, 0.0), self.stop, error))
        self._admit(self._generation.first())

    def _opened(self, opening: Opening) -> None:
        if self._is_over:
            return
        error = Unavailable("the ledger was closed") if opening.cancelled() else opening.result()
        self._is_opened = error is None
        if error is None:
            self._notifier.notify()
        else:
            self.stop(error)

    def stop(self, error: TorchrelayError | None = None) -> None:
        """Makes ``next`` raise ``error``, or ``ClientDisconnected`` if None. Any task of the loop may call it."""
        if not self._is_over:
            self._fail(error or ClientDisconnected())

    @property
    def _is_over(self) -> bool:
        return self._failure is not None or self._settling is not None

    async def next(self) -> list[TokenDelta]:
        """The tokens accepted since the last call; empty after a keep-alive interval without any.

        Raises ``TorchrelayError`` if the request failed, ``ClientDisconnected`` if its client left. The opened row is
        committed before the first tokens are returned.
        """
        while True:
            if self._accepted and self._is_opened:
                deltas, self._accepted = self._accepted, []
                self._num_returned += sum(len(delta.token_ids) for delta in deltas)
                return deltas
            if self._failure is not None:
                raise self._failure
            if not await self._notifier.wait():
                return []

    async def pause(self, pause_s: float) -> None:
        """Sleeps to let tokens accumulate, but not past the last token or a failure."""
        if self._failure is None and not self._generation.is_finished:
            await self._notifier.pause(pause_s)

    async def settled(self, timeout_s: float) -> None:
        """Closes the request and waits up to ``timeout_s`` for its settlement."""
        self.close()
        if self._settling is not None:
            await asyncio.wait({self._settling}, timeout=timeout_s)

    def close(self, unfinished: FinishCause = FinishCause.ERROR) -> None:
        """Stops and releases everything still running and settles the accepted usage. Idempotent.

        ``unfinished`` is the cause for choices that have not finished, unless the request has failed before.
        """
        if self._opening is None or self._settling is not None:
            return
        self._notifier.close()
        self._free()
        if isinstance(self._failure, TorchrelayError):
            unfinished = FinishCause.ERROR
        is_late = isinstance(self._failure, DeadlineExceeded) and self.resolved.is_callers_deadline
        by_caller = unfinished is FinishCause.CANCELLED or is_late
        usages = self._generation.settlement(
            self.resolved.request_id, len(self.resolved.prompt), unfinished, by_caller=by_caller
        )
        self._settling = self._bill.settle(
            self._opening, self._reservation, self.resolved.request_id, self.resolved.model.name, usages
        )

    def _free(self, error: str = "") -> None:
        for timer in self._timers:
            timer.cancel()
        for attempt in self._attempts.values():
            attempt.end(is_running=True, error=error)
        self._attempts.clear()

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_event(self, event: RequestEvent) -> None:
        if self._is_over:
            return
        try:
            if isinstance(event, pb.ChoiceOutput):
                self._output(event)
            else:
                self._handle(event)
        except TorchrelayError as failure:
            self._fail(failure)
        if self._is_opened:  # before that ``next`` has nothing to return
            self._notifier.notify()

    def _fail(self, failure: TorchrelayError | ClientDisconnected) -> None:
        self._failure = failure  # ``next`` raises it after returning the tokens accepted before
        self._free(failure.message if isinstance(failure, TorchrelayError) else "")
        self._notifier.end_pause()
        self._notifier.notify()

    def _handle(self, event: RequestEvent) -> None:
        if isinstance(event, scheduler_pb2.Placement):
            attempt = self._attempts.get(event.key.attempt)
            if attempt is not None and attempt.placement is None:
                attempt.place(event, self._on_event)
        elif isinstance(event, scheduler_pb2.Refusal):
            self._refused(event)
        elif isinstance(event, scheduler_pb2.Recall):
            self._recall(event.key.attempt, event.keeps_prompt)
        elif isinstance(event, WorkerLost):
            attempt = self._attempts.get(event.attempt)
            if attempt is not None and not attempt.survives_loss_of(event.worker_id):
                error = Unavailable(f"worker {event.worker_id} was lost")
                self._retry(event.attempt, error, event.worker_id)
        elif isinstance(event, AdmissionFailed) and event.attempt in self._attempts:
            raise event.error

    def _output(self, output: pb.ChoiceOutput) -> None:
        number = output.key.attempt
        attempt = self._attempts.get(number)
        if attempt is None:
            return
        reason = output.finish_reason
        if reason and reason in FAILED_REASONS:
            self._output_failed(output)
            return
        if self.prompt_scores is not None and output.HasField("prompt_logprobs"):
            self.prompt_scores.add(output.prompt_logprobs)
            return
        delta = self._generation.accept(output)
        if delta is None:
            attempt.is_prompt_begun = True
            self._generation.advance_prompt(output)
            return
        if self.ttft_s is None:
            self.ttft_s = time.monotonic() - self._arrived_at
        attempt.note(output, len(delta.token_ids))
        self._accepted.append(delta)
        plans = self._generation.extend()
        if (plans or delta.finish is not None) and self._generation.is_over(number):
            self._end(number, goes_on=bool(plans))
        elif not attempt.has_left_prefill and self._generation.has_prefilled(number):
            attempt.leave_prefill()
        for plan in plans:
            self._admit(plan)

    def _end(self, number: int, *, goes_on: bool) -> None:
        """Ends an attempt whose choices have ended, or continue in other attempts."""
        self._attempts.pop(number).end(is_running=False, goes_on=goes_on)
        if self._generation.is_finished:
            self._generated_s = time.monotonic() - self._arrived_at
            self._notifier.end_pause()

    def _output_failed(self, output: pb.ChoiceOutput) -> None:
        number, error = output.key.attempt, output.error
        if not self._generation.carries(number, output.choice):
            return
        if output.finish_reason == pb.FINISH_REASON_ERROR and error.code not in RETRIABLE_CODES:
            raise run_error(error, self.resolved.format_field)
        attempt = self._attempts.get(number)
        # The scheduler may take the slot of a running answer again and again, as for tenants without a slot.
        is_excused = bool(attempt and attempt.num_output_tokens and error.code == pb.RunError.CODE_WRONG_INSTANCE)
        self._retry(number, run_error(error), error.lost_worker, is_excused=is_excused)

    def _refused(self, refusal: scheduler_pb2.Refusal) -> None:
        attempt = self._attempts.get(refusal.key.attempt)
        if attempt is None:
            return
        if attempt.placement is None:
            plans: list[AttemptPlan] = []
            ended: list[TokenDelta] = []
            if refusal.reason == scheduler_pb2.Refusal.REASON_TOO_LONG:
                plans, ended = self._generation.shorten(refusal.key.attempt)
            if not (plans or ended):
                raise refusal_error(refusal)
            self._accepted += ended
            self._end(refusal.key.attempt, goes_on=bool(plans))
            for plan in plans:
                self._admit(plan)
            return
        self._retry(refusal.key.attempt, refusal_error(refusal))  # the scheduler reports that its workers are gone

    def _recall(self, number: int, keeps_prompt: bool) -> None:
        """Runs the attempt elsewhere, where it begins sooner. It is no failure and does not count as a try."""
        attempt = self._attempts.get(number)
        if attempt is None or not attempt.may_be_recalled:
            return
        del self._attempts[number]
        attempt.end(is_running=True, is_recalled=True, keeps_prompt=keeps_prompt)
        for plan in self._generation.resume(number, is_excused=True):
            log.info("request_recalled", request_id=self.resolved.request_id, attempt=plan.attempt)
            self._admit(plan)

    def _retry(self, number: int, error: TorchrelayError, lost_worker: str = "", *, is_excused: bool = False) -> None:
        attempt = self._attempts.pop(number, None)
        if attempt is None:
            return
        if lost_worker and lost_worker not in self._lost_workers:
            self._lost_workers.append(lost_worker)
        attempt.end(is_running=True, goes_on=True, error=error.message)
        for plan in self._generation.resume(number, is_excused=is_excused):
            if attempt.num_output_tokens:
                num_tokens = len(self.resolved.prompt) + sum(map(len, plan.forced.values()))
                self.num_recomputed["moved" if is_excused else "lost"] += num_tokens
            num_attempts = self._generation.num_attempts(plan.attempt)
            if num_attempts > self._max_attempts:
                raise AttemptsExhausted(error.message) if type(error) is Unavailable else error
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
