"""The steps from a caller's parameters to a running request, the same for REST and gRPC."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.metrics import Meter

from torchrelay.common.errors import (
    InvalidRequest,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    TorchrelayError,
    Unavailable,
)
from torchrelay.common.process.telemetry import span_of
from torchrelay.common.tokens.text_stream import prompt_end, prompt_text
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.control.v1 import generation_pb2, types_pb2
from torchrelay.gateway.core import (
    EmbeddingSpec,
    FinishCause,
    FirstToken,
    Principal,
    PublishedModel,
    RatesLeft,
    Reservation,
)
from torchrelay.gateway.inference.answers.answer_parser import AnswerParser
from torchrelay.gateway.inference.answers.parts import ParameterTypes, parameter_types
from torchrelay.gateway.inference.answers.syntax import PLAIN, AnswerSyntax
from torchrelay.gateway.inference.choice_reader import ChoiceReader
from torchrelay.gateway.inference.core import (
    ClientDisconnected,
    GenerateParams,
    ResolvedRequest,
    Usage,
)
from torchrelay.gateway.inference.execution.attempt import Upstreams
from torchrelay.gateway.inference.execution.joint_bill import JointBill
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter, RequestBill
from torchrelay.gateway.inference.execution.running_request import SETTLE_TIMEOUT_S, RunningRequest
from torchrelay.gateway.inference.interfaces import ModelCatalog, RequestLimiter
from torchrelay.gateway.inference.metrics import InferenceMetrics, Operation
from torchrelay.gateway.inference.sampling import GenerationBounds, context_exceeded, sampling_of
from torchrelay.gateway.inference.text.decoder_cache import ModelDecoder
from torchrelay.gateway.inference.text.detokenizer import ChoiceDetokenizer
from torchrelay.gateway.inference.text.prompt_encoder import EncodedPrompt, PromptEncoder

MAX_FIRST_TOKENS = 10_000  # kept for the console


@dataclass(frozen=True, slots=True)
class RequestSession:
    """A request under way, with a detokenizer per choice."""

    request: RunningRequest
    texts: tuple[ChoiceDetokenizer, ...]
    rates: RatesLeft  # of the caller's key and tenant
    tokens: TokenBytes | None = None  # if logprobs were requested
    syntax: AnswerSyntax = PLAIN  # of an answer to messages
    tools: ParameterTypes | None = None  # that the answer may call
    echo: str = ""  # the prompt's text, if the reply begins with it
    scored_by: ModelDecoder | None = None  # if logprobs of the prompt were requested

    def choices(self, *, divides: bool = True) -> tuple[ChoiceReader, ...]:
        """A reader of each choice's tokens. ``divides``: reasoning and calls are parts of their own."""
        has_parts = divides and (self.syntax.thoughts is not None or bool(self.tools))
        return tuple(
            ChoiceReader(text, AnswerParser(self.syntax, self.tools) if has_parts else None, self.tokens)
            for text in self.texts
        )

    def usage(self, choices: Iterable[ChoiceReader]) -> Usage:
        """The usage of the request, with the tokens of reasoning that were read if the model shows any."""
        usage = self.request.usage
        if self.syntax.thoughts is None:
            return usage
        return replace(usage, num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices))


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request with everything that can fail before it is admitted."""

    model: PublishedModel
    params: GenerateParams  # without the prompt
    prompt: Sequence[int]
    syntax: AnswerSyntax
    sampling: generation_pb2.Sampling
    decoder: ModelDecoder
    echo: str

    @property
    def prompt_end(self) -> tuple[int, ...]:
        return prompt_end(self.decoder.tokens, self.prompt)

    def resolved(
        self,
        request_id: str,
        principal: Principal,
        arrived_unix_us: int,
        deadline: tuple[int, bool],
        reservation: Reservation,
    ) -> ResolvedRequest:
        params = self.params
        self.sampling.max_tokens = reservation.max_output_tokens // params.num_choices
        return ResolvedRequest(
            request_id,
            principal,
            self.model,
            self.prompt,
            self.prompt_end,
            self.sampling,
            params.num_choices,
            arrived_unix_us,
            *deadline,
            principal.class_of(params.service_class),
            "tools" if params.answer_format is None else params.answer_format.field,
        )

    def detokenizers(self) -> tuple[ChoiceDetokenizer, ...]:
        """A detokenizer for each choice."""
        params = self.params
        markers = self.syntax.markers(has_tools=bool(params.tools))
        text_ends = params.stop, self.sampling.stop_token_ids, params.min_tokens, markers
        last_tokens = self.prompt_end
        return tuple(ChoiceDetokenizer(self.decoder.tokens, last_tokens, *text_ends) for _ in range(params.num_choices))

    def session(
        self, request: RunningRequest, texts: tuple[ChoiceDetokenizer, ...], rates: RatesLeft
    ) -> RequestSession:
        tokens = None if self.params.top_logprobs is None else self.decoder.token_bytes
        tools = parameter_types(self.params.tools) or None
        scored_by = None if self.params.prompt_logprobs is None else self.decoder
        return RequestSession(request, texts, rates, tokens, self.syntax, tools, self.echo, scored_by)


def earlier_deadline(arrived_unix_us: int, callers_s: float | None, operators_s: float) -> tuple[int, bool]:
    """The earlier deadline in Unix microseconds, and whether it is the caller's; 0: neither sets one.

    Both count from the arrival. ``callers_s``: None for none; ``operators_s``: 0 for none.
    """
    timeout_s, is_callers = min((math.inf if callers_s is None else callers_s, True), (operators_s or math.inf, False))
    return (0, False) if timeout_s == math.inf else (arrived_unix_us + int(timeout_s * 1e6), is_callers)


def _refuse_admin(principal: Principal) -> None:
    if principal.is_admin:  # it has no tenant to resolve short model names in, or to bill
        raise PermissionDenied("the admin key cannot call models; create a tenant key (torchrelay key create)")


def _is_reranker(model: PublishedModel) -> bool:
    embedding = model.version.embedding
    return embedding is not None and embedding.pooling == types_pb2.POOLING_SCORE


class RequestPipeline:
    """Resolves, tokenizes, limits and runs requests."""

    def __init__(
        self,
        catalog: ModelCatalog,
        limits: RequestLimiter,
        prompts: PromptEncoder,
        upstreams: Upstreams,
        ledger_writer: LedgerWriter,
        bounds: GenerationBounds,
        *,
        max_attempts: int,
        keep_alive_s: float,
        request_timeout_s: float = 0.0,
        meter: Meter | None = None,
    ) -> None:
        self._catalog = catalog
        self._limits = limits
        self._prompts = prompts
        self._upstreams = upstreams
        self.ledger_writer = ledger_writer
        self._bill: RequestBill = ledger_writer
        self._bounds = bounds
        self._max_attempts = max_attempts
        self._keep_alive_s = keep_alive_s
        self._request_timeout_s = request_timeout_s
        self.requests: set[RunningRequest] = set()  # under way
        self.first_tokens: deque[FirstToken] = deque(maxlen=MAX_FIRST_TOKENS)  # of recently ended requests
        self._inside: set[object] = set()
        self._is_of_line = False
        self._metrics = InferenceMetrics(
            lambda: len(self.requests),
            lambda: ledger_writer.num_waiting,
            ledger_writer.billed_nano,
            ledger_writer.labels,
            meter,
        )
        self._idle = asyncio.Event()
        self._idle.set()

    def for_line(self, catalog: ModelCatalog, bill: RequestBill, timeout_s: float) -> RequestPipeline:
        """The same pipeline for a line of a batch, which has its own prices, bill and time."""
        pipeline = copy(self)
        pipeline._catalog, pipeline._bill, pipeline._request_timeout_s = catalog, bill, timeout_s
        pipeline._is_of_line = True
        return pipeline

    @asynccontextmanager
    async def session(
        self,
        principal: Principal,
        params: GenerateParams,
        request_id: str,
        arrived_unix_us: int,
        timeout_s: float | None = None,
    ) -> AsyncIterator[RequestSession]:
        """The session of a single prompt; see ``sessions``."""
        prompts = [params]
        del params
        async with self.sessions(principal, prompts, request_id, arrived_unix_us, timeout_s) as [session]:
            yield session

    @asynccontextmanager
    async def sessions(
        self,
        principal: Principal,
        prompts: list[GenerateParams],
        request_id: str,
        arrived_unix_us: int,
        timeout_s: float | None = None,
    ) -> AsyncIterator[list[RequestSession]]:
        """Starts a request for each of ``prompts``, which are taken out of the list, or none if any cannot be started.

        On leaving the block they are freed, released and settled, whatever happened. The first has ``request_id``, the
        others that with ``-1``, ``-2``, ... ``arrived_unix_us``: when the server began handling them, the origin of
        their timelines. ``timeout_s``: how long after that the caller waits; None: indefinitely. Raises
        ``TorchrelayError``.
        """
        name, operation = prompts[0].model, Operation.COMPLETION if prompts[0].messages is None else Operation.CHAT
        starting = self._start(principal, prompts, request_id, arrived_unix_us, timeout_s)
        async with self._entered(starting, operation, request_id, name) as sessions:
            yield sessions

    @asynccontextmanager
    async def embeddings(
        self,
        principal: Principal,
        model: PublishedModel,
        prompts: Sequence[EncodedPrompt],
        request_id: str,
        arrived_unix_us: int,
    ) -> AsyncIterator[Callable[[int], RequestSession]]:
        """Admits a call for the embeddings of encoded prompts, and gives what starts the request of each prompt.

        The call has one reservation, counts once in the rate of its key, and has one bill, which is 0 if any of its
        requests fails. On leaving the block all is as with ``sessions``.
        """
        deadline_unix_us, _ = earlier_deadline(arrived_unix_us, None, self._request_timeout_s)
        bill = JointBill(self._bill, request_id, sum(map(len, prompts)))
        sessions: list[RequestSession] = []

        async def admit() -> list[RequestSession]:
            bill.reservation = await self._limits.admit(principal, model, bill.num_prompt_tokens, 0, 0)
            return sessions

        def start(index: int) -> RequestSession:
            assert bill.reservation is not None and model.version.embedding is not None, "both were checked before"
            resolved = ResolvedRequest(
                f"{request_id}-{index}" if index else request_id,
                principal,
                model,
                prompts[index].token_ids,
                prompt_end=(),
                sampling=generation_pb2.Sampling(),
                num_choices=1,
                arrived_unix_us=arrived_unix_us,
                deadline_unix_us=deadline_unix_us,
                service_class=principal.service_class,
                pooling=model.version.embedding.pooling,
                second_text=prompts[index].second_text,
            )
            session = RequestSession(self._new(resolved, bill.reservation, bill), (), bill.reservation.rates)
            sessions.append(session)
            self._run(session.request)
            return session

        operation = Operation.RERANK if _is_reranker(model) else Operation.EMBEDDINGS
        try:
            async with self._entered(admit(), operation, request_id, model.name):
                yield start
        finally:
            bill.end()
            if bill.reservation is not None and not sessions:
                self._limits.abandon(bill.reservation)
        await bill.settled(SETTLE_TIMEOUT_S)

    @asynccontextmanager
    async def _entered(
        self,
        starting: Coroutine[Any, Any, list[RequestSession]],
        operation: Operation,
        request_id: str,
        model_name: str,
    ) -> AsyncIterator[list[RequestSession]]:
        inside = object()
        self._inside.add(inside)
        self._idle.clear()
        began_s, outcome = time.monotonic(), TorchrelayError.code
        sessions: list[RequestSession] = []
        with span_of("gateway.request", request_id=request_id, model=model_name[:200]) as span:
            try:
                sessions = await starting
                try:
                    yield sessions
                except (asyncio.CancelledError, GeneratorExit, ClientDisconnected):
                    for session in sessions:
                        session.request.close(FinishCause.CANCELLED)
                    raise
                finally:
                    for session in sessions:
                        self.leave(session.request)
                outcome = "ok"
            except TorchrelayError as error:
                outcome = error.code
                raise
            except (asyncio.CancelledError, GeneratorExit, ClientDisconnected):
                outcome = "client_left"
                raise
            finally:
                ended: list[RunningRequest] | list[None] = [session.request for session in sessions] or [None]
                for each in ended:
                    self._metrics.ended(operation, each, outcome, time.monotonic() - began_s, span)
                self._inside.remove(inside)
                if not self._inside:
                    self._idle.set()

    def leave(self, request: RunningRequest) -> None:
        """Frees a request, before its block ends perhaps."""
        request.close()
        if request not in self.requests:
            return
        self.requests.remove(request)
        if request.ttft_s is not None:
            tenant_id = request.resolved.principal.tenant_id
            self.first_tokens.append(FirstToken(time.monotonic(), tenant_id, request.ttft_s))

    async def num_prompt_tokens(self, principal: Principal, params: GenerateParams) -> int:
        """The number of prompt tokens that a request would have; runs nothing. Raises ``TorchrelayError``."""
        model = await self._catalog.resolve(principal, params.model)
        return len((await self._prompts.encode(principal, model, params)).token_ids)

    async def reranker(self, principal: Principal, name: str) -> PublishedModel:
        """A model that gives scores. Raises ``InvalidRequest`` for another."""
        _refuse_admin(principal)
        model = await self._catalog.resolve(principal, name)
        if not _is_reranker(model):
            message = f"{model.name} is no reranker: /v1/rerank takes classifiers of one label"
            raise InvalidRequest(message, field="model")
        return model

    async def embedding_model(self, principal: Principal, name: str) -> tuple[PublishedModel, EmbeddingSpec]:
        """A model, and the embeddings that it declares. Raises ``InvalidRequest`` if it declares none."""
        _refuse_admin(principal)
        model = await self._catalog.resolve(principal, name)
        if _is_reranker(model):
            raise InvalidRequest(f"{model.name} is a reranker: it gives scores alone, by /v1/rerank", field="model")
        if model.version.embedding is None:
            message = f"{model.name} declares no embeddings; publish it with modules.json and 1_Pooling/config.json"
            raise InvalidRequest(message, field="model")
        return model, model.version.embedding

    async def embedding_prompt(
        self, principal: Principal, model: PublishedModel, params: GenerateParams
    ) -> EncodedPrompt:
        """The tokens of a text to embed or a pair to score, which may fill the context. Raises ``InvalidRequest``."""
        prompt = await self._prompts.encode(principal, model, params)
        context = model.version.shape.max_context_tokens
        if len(prompt) > context:
            raise context_exceeded(len(prompt), context, params.prompt_field)
        return prompt

    async def _start(
        self,
        principal: Principal,
        prompts: list[GenerateParams],
        request_id: str,
        arrived_unix_us: int,
        timeout_s: float | None,
    ) -> list[RequestSession]:
        deadline = earlier_deadline(arrived_unix_us, timeout_s, self._request_timeout_s)
        _refuse_admin(principal)
        # Together the prompts may have as many tokens by default as one alone, so that a budget has space for them.
        bounds = replace(self._bounds, default_max_tokens=max(self._bounds.default_max_tokens // len(prompts), 1))
        prepared: list[PreparedRequest] = []
        while prompts:  # megabytes of text, perhaps; each is kept until it is encoded
            prepared.append(await self._prepare(principal, prompts.pop(0), bounds))
        texts = [each.detokenizers() for each in prepared]
        reservations = await self._admit(principal, prepared)
        sessions = []  # nothing fails from here on: a request that has started is billed
        for number, (each, reservation) in enumerate(zip(prepared, reservations, strict=True)):
            number_id = f"{request_id}-{number}" if number else request_id
            resolved = each.resolved(number_id, principal, arrived_unix_us, deadline, reservation)
            sessions.append(each.session(self._new(resolved, reservation), texts[number], reservations[0].rates))
        for session in sessions:
            self._run(session.request)
        return sessions

    async def _prepare(self, principal: Principal, params: GenerateParams, bounds: GenerationBounds) -> PreparedRequest:
        model = await self._catalog.resolve(principal, params.model)
        if model.version.has_no_head:
            given = "scores alone, by /v1/rerank" if _is_reranker(model) else "embeddings alone, by /v1/embeddings"
            message = f"{model.name} has no head for tokens: it gives {given}"
            raise InvalidRequest(message, field="model")
        encoded = await self._prompts.encode(principal, model, params)
        prompt = encoded.token_ids
        sampling = sampling_of(params, model, len(prompt), bounds, encoded.grammar)
        decoder = await self._prompts.decoder(principal, model)
        echo = (prompt_text(decoder.tokens, prompt) if params.text is None else params.text) if params.echo else ""
        rest = replace(params, messages=None, text=None, token_ids=None)
        return PreparedRequest(model, rest, prompt, encoded.syntax, sampling, decoder, echo)

    async def _admit(self, principal: Principal, prepared: Sequence[PreparedRequest]) -> list[Reservation]:
        """A reservation for each, or for none. They count once in the rate of the caller's key."""
        reservations: list[Reservation] = []
        try:
            for each in prepared:
                # Without a limit of its own, an answer gets what is left of the budget: at least a token per choice.
                least = each.params.num_choices if each.params.max_tokens is None else None
                most = each.sampling.max_tokens * each.params.num_choices
                reservation = await self._limits.admit(
                    principal, each.model, len(each.prompt), most, least, num_requests=0 if reservations else 1
                )
                reservations.append(reservation)
        except BaseException as refused:
            for reservation in reservations:
                self._limits.abandon(reservation)
            # By those before it, and would be again; a line of a batch is tried when others have ended.
            if isinstance(refused, RateLimited) and reservations and not self._is_of_line:
                message = "the prompts of this request together need more than the limits leave; send fewer at once"
                raise QuotaExceeded(f"{message}, or lower max_tokens") from refused
            raise
        return reservations

    def _new(
        self, resolved: ResolvedRequest, reservation: Reservation, bill: RequestBill | None = None
    ) -> RunningRequest:
        return RunningRequest(
            resolved,
            self._upstreams,
            bill or self._bill,
            reservation,
            max_attempts=self._max_attempts,
            keep_alive_s=self._keep_alive_s,
        )

    def _run(self, request: RunningRequest) -> None:
        self.requests.add(request)
        request.start()

    async def drain(self, timeout_s: float, end_s: float) -> None:
        """Waits ``timeout_s`` for running requests, then ends the rest and waits ``end_s`` for them to close."""
        await self._wait_idle(timeout_s)
        await self.stop_all(end_s)

    async def stop_all(self, timeout_s: float) -> None:
        """Ends every request with a shutdown error and waits until all are closed."""
        for request in self.requests:
            request.stop(Unavailable("the gateway is shutting down"))
        await self._wait_idle(timeout_s)

    async def _wait_idle(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
