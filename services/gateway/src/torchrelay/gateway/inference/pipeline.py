"""The steps from a caller's parameters to a running request, the same for REST and gRPC."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from opentelemetry.metrics import Meter

from torchrelay.common.errors import InvalidRequest, PermissionDenied, TorchrelayError, Unavailable
from torchrelay.common.process.telemetry import span_of
from torchrelay.common.tokens.text_stream import prompt_end, prompt_text
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.control.v1 import generation_pb2
from torchrelay.gateway.core import (
    EmbeddingSpec,
    FinishCause,
    FirstToken,
    Principal,
    PublishedModel,
    RequestRate,
    Reservation,
)
from torchrelay.gateway.inference.answers.answer_parser import AnswerParser
from torchrelay.gateway.inference.answers.parts import ParameterTypes, parameter_types
from torchrelay.gateway.inference.answers.syntax import PLAIN, AnswerSyntax
from torchrelay.gateway.inference.core import (
    ClientDisconnected,
    GenerateParams,
    LogprobDelta,
    ResolvedRequest,
    TokenDelta,
    TokenLogprobs,
)
from torchrelay.gateway.inference.execution.attempt import Upstreams
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter
from torchrelay.gateway.inference.execution.running_request import RunningRequest
from torchrelay.gateway.inference.interfaces import ModelCatalog, RequestLimiter
from torchrelay.gateway.inference.metrics import InferenceMetrics, Operation
from torchrelay.gateway.inference.sampling import GenerationBounds, context_exceeded, sampling_of
from torchrelay.gateway.inference.text.detokenizer import ChoiceDetokenizer, PlacedToken
from torchrelay.gateway.inference.text.prompt_encoder import PromptEncoder

MAX_FIRST_TOKENS = 10_000  # kept for the console


@dataclass(frozen=True, slots=True)
class RequestSession:
    """A request under way, with a detokenizer per choice."""

    request: RunningRequest
    texts: tuple[ChoiceDetokenizer, ...]
    rate: RequestRate | None  # of the caller's key
    tokens: TokenBytes | None = None  # if logprobs were requested
    syntax: AnswerSyntax = PLAIN  # of an answer to messages
    tools: ParameterTypes | None = None  # that the answer may call
    echo: str = ""  # the prompt's text, if the reply begins with it

    def answer_parser(self) -> AnswerParser | None:
        """A parser of a choice's text; None if the text is all content."""
        if self.syntax.thoughts is None and not self.tools:
            return None
        return AnswerParser(self.syntax, self.tools)

    def placed(self, delta: TokenDelta) -> Iterator[tuple[PlacedToken, int, TokenLogprobs]]:
        """(part in the text, id, logprobs) of each token, of a request with logprobs."""
        assert self.tokens is not None, "only for requests with logprobs"
        text = self.texts[delta.choice]
        for token_id, logprobs in LogprobDelta.pairs(delta):
            yield text.step_placed(token_id, self.tokens.in_text(token_id)), token_id, logprobs


def earlier_deadline(arrived_unix_us: int, callers_s: float | None, operators_s: float) -> tuple[int, bool]:
    """The earlier deadline in Unix microseconds, and whether it is the caller's; 0: neither sets one.

    Both count from the arrival. ``callers_s``: None for none; ``operators_s``: 0 for none.
    """
    timeout_s, is_callers = min((math.inf if callers_s is None else callers_s, True), (operators_s or math.inf, False))
    return (0, False) if timeout_s == math.inf else (arrived_unix_us + int(timeout_s * 1e6), is_callers)


def _refuse_admin(principal: Principal) -> None:
    if principal.is_admin:  # it has no tenant to resolve short model names in, or to bill
        raise PermissionDenied("the admin key cannot call models; create a tenant key (torchrelay key create)")


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
        self._ledger_writer = ledger_writer
        self._bounds = bounds
        self._max_attempts = max_attempts
        self._keep_alive_s = keep_alive_s
        self._request_timeout_s = request_timeout_s
        self.requests: set[RunningRequest] = set()  # under way
        self.first_tokens: deque[FirstToken] = deque(maxlen=MAX_FIRST_TOKENS)  # of recently ended requests
        self._num_inside = 0
        self._metrics = InferenceMetrics(
            lambda: len(self.requests), lambda: ledger_writer.num_waiting, ledger_writer.billed_nano, meter
        )
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def session(
        self,
        principal: Principal,
        params: GenerateParams,
        request_id: str,
        arrived_unix_us: int,
        timeout_s: float | None = None,
    ) -> AsyncIterator[RequestSession]:
        """Starts a request; on leaving the block it is freed, released and settled, whatever happened.

        ``arrived_unix_us``: when the server began handling it, the origin of its timeline. ``timeout_s``: how long
        after that its caller waits; None: indefinitely. Raises ``TorchrelayError`` if it cannot be started.
        """
        name = params.model
        operation = Operation.COMPLETION if params.messages is None else Operation.CHAT
        starting = self._start(principal, params, request_id, arrived_unix_us, timeout_s)
        del params  # megabytes of text, perhaps; they are kept until the prompt is encoded
        async with self._entered(starting, operation, request_id, name) as session:
            yield session

    @asynccontextmanager
    async def embedding(
        self,
        principal: Principal,
        model: PublishedModel,
        prompt: tuple[int, ...],
        request_id: str,
        arrived_unix_us: int,
    ) -> AsyncIterator[RequestSession]:
        """Starts a request for the embedding of an encoded prompt; the same as ``session`` otherwise."""
        starting = self._start_embedding(principal, model, prompt, request_id, arrived_unix_us)
        async with self._entered(starting, Operation.EMBEDDINGS, request_id, model.name) as session:
            yield session

    @asynccontextmanager
    async def _entered(
        self, starting: Coroutine[Any, Any, RequestSession], operation: Operation, request_id: str, model_name: str
    ) -> AsyncIterator[RequestSession]:
        self._num_inside += 1
        self._idle.clear()
        began_s, outcome = time.monotonic(), TorchrelayError.code
        request: RunningRequest | None = None
        with span_of("gateway.request", request_id=request_id, model=model_name[:200]) as span:
            try:
                session = await starting
                request = session.request
                try:
                    yield session
                except (asyncio.CancelledError, GeneratorExit, ClientDisconnected):
                    request.close(FinishCause.CANCELLED)
                    raise
                finally:
                    request.close()
                    self.requests.discard(request)
                    if request.ttft_s is not None:
                        tenant_id = request.resolved.principal.tenant_id
                        self.first_tokens.append(FirstToken(time.monotonic(), tenant_id, request.ttft_s))
                outcome = "ok"
            except TorchrelayError as error:
                outcome = error.code
                raise
            except (asyncio.CancelledError, GeneratorExit, ClientDisconnected):
                outcome = "client_left"
                raise
            finally:
                self._metrics.ended(operation, request, outcome, time.monotonic() - began_s, span)
                self._num_inside -= 1
                if not self._num_inside:
                    self._idle.set()

    async def num_prompt_tokens(self, principal: Principal, params: GenerateParams) -> int:
        """The number of prompt tokens that a request would have; runs nothing. Raises ``TorchrelayError``."""
        model = await self._catalog.resolve(principal, params.model)
        return len((await self._prompts.encode(principal, model, params)).token_ids)

    async def embedding_model(self, principal: Principal, name: str) -> tuple[PublishedModel, EmbeddingSpec]:
        """A model, and the embeddings that it declares. Raises ``InvalidRequest`` if it declares none."""
        _refuse_admin(principal)
        model = await self._catalog.resolve(principal, name)
        if model.version.embedding is None:
            message = f"{model.name} declares no embeddings; publish it with modules.json and 1_Pooling/config.json"
            raise InvalidRequest(message, field="model")
        return model, model.version.embedding

    async def embedding_prompt(
        self, principal: Principal, model: PublishedModel, params: GenerateParams
    ) -> tuple[int, ...]:
        """The token ids of a text to embed, which may fill the context. Raises ``InvalidRequest``."""
        prompt = await self._prompts.token_ids(principal, model, params)
        context = model.version.shape.max_context_tokens
        if len(prompt) > context:
            raise context_exceeded(len(prompt), context, params.prompt_field)
        return prompt

    async def _start(
        self,
        principal: Principal,
        params: GenerateParams,
        request_id: str,
        arrived_unix_us: int,
        timeout_s: float | None,
    ) -> RequestSession:
        deadline_unix_us, is_callers_deadline = earlier_deadline(arrived_unix_us, timeout_s, self._request_timeout_s)
        _refuse_admin(principal)
        model = await self._catalog.resolve(principal, params.model)
        if model.version.has_no_head:
            message = f"{model.name} has no head for tokens: it gives embeddings alone, by /v1/embeddings"
            raise InvalidRequest(message, field="model")
        encoded = await self._prompts.encode(principal, model, params)
        prompt, syntax = encoded.token_ids, encoded.syntax
        sampling = sampling_of(params, model, len(prompt), self._bounds, encoded.grammar)
        decoder = await self._prompts.decoder(principal, model)
        last_tokens = prompt_end(decoder.tokens, prompt)
        echo = (prompt_text(decoder.tokens, prompt) if params.text is None else params.text) if params.echo else ""
        # Without a limit of its own, an answer gets what is left of the budget: at least a token per choice.
        least = params.num_choices if params.max_tokens is None else None
        most = sampling.max_tokens * params.num_choices
        reservation = await self._limits.admit(principal, model, len(prompt), most, least)
        sampling.max_tokens = reservation.max_output_tokens // params.num_choices
        resolved = ResolvedRequest(
            request_id,
            principal,
            model,
            prompt,
            last_tokens,
            sampling,
            params.num_choices,
            arrived_unix_us,
            deadline_unix_us,
            is_callers_deadline,
            principal.service_class if params.service_class is None else params.service_class,
        )
        request = self._run(resolved, reservation)
        markers = syntax.markers(has_tools=bool(params.tools))
        text_ends = params.stop, sampling.stop_token_ids, params.min_tokens, markers
        texts = tuple(ChoiceDetokenizer(decoder.tokens, last_tokens, *text_ends) for _ in range(params.num_choices))
        return RequestSession(
            request,
            texts,
            reservation.rate,
            None if params.top_logprobs is None else decoder.token_bytes,
            syntax,
            parameter_types(params.tools) or None,
            echo,
        )

    async def _start_embedding(
        self,
        principal: Principal,
        model: PublishedModel,
        prompt: tuple[int, ...],
        request_id: str,
        arrived_unix_us: int,
    ) -> RequestSession:
        deadline_unix_us, _ = earlier_deadline(arrived_unix_us, None, self._request_timeout_s)
        embedding = model.version.embedding
        assert embedding is not None, "embedding_model has refused any other"
        reservation = await self._limits.admit(principal, model, len(prompt), 0, 0)
        resolved = ResolvedRequest(
            request_id,
            principal,
            model,
            prompt,
            prompt_end=(),
            sampling=generation_pb2.Sampling(),
            num_choices=1,
            arrived_unix_us=arrived_unix_us,
            deadline_unix_us=deadline_unix_us,
            service_class=principal.service_class,
            pooling=embedding.pooling,
        )
        return RequestSession(self._run(resolved, reservation), (), reservation.rate)

    def _run(self, resolved: ResolvedRequest, reservation: Reservation) -> RunningRequest:
        request = RunningRequest(
            resolved,
            self._upstreams,
            self._ledger_writer,
            reservation,
            max_attempts=self._max_attempts,
            keep_alive_s=self._keep_alive_s,
        )
        self.requests.add(request)
        request.start()
        return request

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
