"""``/v1/chat/completions`` and ``/v1/completions`` as a bare ASGI application, without framework code per token."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import InvalidRequest, TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.common.process.telemetry import get_logger
from torchrelay.gateway.core import FinishCause, Principal, RequestRate
from torchrelay.gateway.inference.answers.parts import Part, Reasoning
from torchrelay.gateway.inference.choice_reader import ChoiceReader, Step
from torchrelay.gateway.inference.core import ClientDisconnected, GenerateParams, TokenDelta, Usage
from torchrelay.gateway.inference.execution.running_request import SETTLE_TIMEOUT_S
from torchrelay.gateway.inference.interfaces import Authenticator
from torchrelay.gateway.inference.pipeline import RequestPipeline, RequestSession
from torchrelay.gateway.limits.connection_shares import ConnectionShares
from torchrelay.gateway.limits.shares import ShareAccount
from torchrelay.gateway.openai import errors, replies, requests
from torchrelay.gateway.openai.http_request import HttpRequest
from torchrelay.gateway.openai.logprobs import LogprobFormatter
from torchrelay.gateway.openai.prompt_logprobs import prompt_logprobs
from torchrelay.gateway.openai.replies import Answer, ChoiceBuffer, ReplyFormat, StreamReply

log = get_logger(__name__)
T = TypeVar("T")

PATHS = {"/v1/chat/completions": True, "/v1/completions": False}  # whether it is a chat
# Tokens arriving within one gap are written together, each still its own event: a write costs several times as much as
# everything else per token. Streams of up to a hundred tokens per second never wait, nor does a stream's last token.
WRITE_GAP_S = 0.010
CLOSE = (b"connection", b"close")  # of an answer that ends the connection
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    http_status = 405


class CompletionsApp:
    """The ASGI application, for the requests that the router sends it: HTTP, and a path of ``PATHS``."""

    def __init__(
        self,
        keys: Authenticator,
        pipeline: RequestPipeline,
        shares: ConnectionShares,
        max_body_bytes: int,
        write_gap_s: float = WRITE_GAP_S,
    ) -> None:
        self._keys = keys
        self._pipeline = pipeline
        self._shares = shares
        self._max_body_bytes = max_body_bytes
        self._write_gap_s = write_gap_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange(HttpRequest(scope, receive), send)
        try:
            principal = await exchange.request.authenticate(self._keys)
            if scope["method"] != "POST":
                message = f"method {scope['method']} is not allowed for {scope['path']}; use POST"
                await exchange.refuse(MethodNotAllowed(message), [(b"allow", b"POST")])
                return
            shares, tenant_id = self._shares, principal.tenant_id
            with shares.requests.account(tenant_id) as held, shares.answer_bytes.account(tenant_id) as answer_bytes:
                held.take(1)
                exchange.answer_bytes = answer_bytes
                await self._complete(exchange, scope["path"], principal, held)
        except ClientDisconnected:
            return
        except TorchrelayError as error:
            await exchange.fail(error)
        except Exception:  # process boundary: the client gets an answer, the operator the traceback
            log.exception("request_crashed", request_id=exchange.request_id)
            await exchange.fail(TorchrelayError("internal error; include the request id when reporting it"))

    def _exchange(self, request: HttpRequest, send: Send) -> HttpExchange:
        return HttpExchange(request, send, self._write_gap_s)

    async def _complete(self, exchange: HttpExchange, path: str, principal: Principal, held: ShareAccount) -> None:
        """Answers each prompt by a request of its own, all at once."""
        with self._shares.body_bytes.account(principal.tenant_id) as body_bytes:
            encoded = await exchange.request.read(self._max_body_bytes, body_bytes)
            prompts, reply_format, is_stream = self._decoded(encoded, path)
            exchange.left_out = prompts[0].left_out
            del encoded  # otherwise kept until the end of the answer, as each prompt would be in ``prompts``
            held.take(len(prompts) - 1)
            entering = self._pipeline.sessions(principal, prompts, exchange.request_id, exchange.arrived_unix_us)
            async with AsyncExitStack() as stack:
                async with exchange.request.until_disconnect():
                    sessions = await stack.enter_async_context(entering)
                body_bytes.release(reply_format.num_held_bytes)  # the prompts are encoded
                await exchange.answer(sessions, reply_format, is_stream)

    def _decoded(self, encoded: bytearray, path: str) -> tuple[list[GenerateParams], ReplyFormat, bool]:
        """The parameters of each prompt, the format of the reply, and whether it is streamed."""
        body: requests.BaseBody
        is_chat, num_best, has_logprobs, num_echoed = PATHS[path], 0, True, None
        if is_chat:
            body = chat = requests.decode_chat(encoded)
            prompts = [requests.params_of_chat(chat)]
            shows_reasoning = chat.include_reasoning is not False
        else:
            body = completion = requests.decode_completion(encoded)
            prompts = [requests.params_of_completion(each) for each in requests.one_per_prompt(completion)]
            shows_reasoning = True  # as part of the text
            num_echoed = completion.logprobs if completion.echo else None
            if requests.chooses_best(completion):
                num_best, has_logprobs = completion.n or 1, completion.logprobs is not None
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        has_ids = bool(body.return_token_ids)
        reply_format = ReplyFormat(
            is_chat, wants_usage, has_ids, shows_reasoning, num_best, has_logprobs, num_echoed, body.prompt_logprobs
        )
        return prompts, reply_format, bool(body.stream)


class HttpExchange:
    """An HTTP request and its response."""

    id_headers: ClassVar[Sequence[bytes]] = (b"x-request-id",)
    answer_bytes: ShareAccount  # of what is kept of the answer, once the key is checked

    def __init__(self, request: HttpRequest, send: Send, write_gap_s: float) -> None:
        self.request = request
        self._send = send
        self._has_begun = False
        self._write_gap_s = write_gap_s
        self.request_id, self.arrived_unix_us = new_id("req"), now_unix_us()
        self.rate: RequestRate | None = None
        self.left_out: tuple[str, ...] = ()  # of the prompt

    async def answer(self, sessions: Sequence[RequestSession], reply_format: ReplyFormat, is_stream: bool) -> None:
        """Runs the requests to their ends, or until their client disconnects."""
        self.rate = sessions[0].rate
        watcher = asyncio.ensure_future(self._watch(sessions))
        try:
            await (self._stream(sessions, reply_format) if is_stream else self._answer_at_once(sessions, reply_format))
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    def error_body(self, error: TorchrelayError) -> Any:
        """The JSON of an error."""
        return errors.error_body(error)

    def error_event(self, error: TorchrelayError) -> bytes:
        """The last event of a failed stream."""
        return replies.error_event(self.error_body(error))

    def encoder(self, session: RequestSession, reply_format: ReplyFormat, first_index: int) -> StreamEncoder:
        """The encoder of the events of a prompt's answer; ``first_index`` is that of its first choice."""
        return SseEncoder(session, reply_format, self.request_id, first_index)

    def whole(self, sessions: Sequence[RequestSession], reply_format: ReplyFormat, answers: Sequence[Answer]) -> bytes:
        """The JSON of a finished request."""
        return replies.whole_reply(reply_format, answers)

    async def reply(self, body: Any) -> None:
        """Answers with JSON."""
        await self._reply(200, msgspec.json.encode(body))

    async def reply_in_parts(self, parts: Iterable[bytes]) -> None:
        """Answers with the parts of a JSON, each of which is made when the client has taken those before."""
        await self._begin(200, [_JSON])
        for part in parts:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: TorchrelayError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        listed = [*headers, CLOSE] if self.request.must_close else headers
        await self._reply(error.http_status, msgspec.json.encode(self.error_body(error)), listed)

    async def fail(self, error: TorchrelayError) -> None:
        """Reports an error: by status and body, or as the last event if the response has begun."""
        if self._has_begun:
            await self._send({"type": "http.response.body", "body": self.error_event(error)})
            return
        await self.refuse(error, encoded_headers(errors.error_headers(error)))

    async def _reply(self, status: int, encoded: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        await self._begin(status, [_JSON, (b"content-length", str(len(encoded)).encode()), *headers])
        await self._send({"type": "http.response.body", "body": encoded})

    async def _watch(self, sessions: Sequence[RequestSession]) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        for session in sessions:
            session.request.stop()

    async def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        elapsed_ms = max(0, now_unix_us() - self.arrived_unix_us) // 1000  # until the answer begins
        listed = [*headers, *self.request.id_headers(self.id_headers, self.request_id)]
        listed.append((b"openai-processing-ms", b"%d" % elapsed_ms))
        if self.left_out:
            listed.append((b"x-torchrelay-left-out", ", ".join(self.left_out).encode()))
        if self.rate is not None:
            listed += encoded_headers(errors.rate_headers(self.rate))
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def _answer_at_once(self, sessions: Sequence[RequestSession], reply_format: ReplyFormat) -> None:
        answers = await _all_of([_whole_answer(session, reply_format, self.answer_bytes) for session in sessions])
        await self._reply(200, self.whole(sessions, reply_format, answers))

    async def _stream(self, sessions: Sequence[RequestSession], reply_format: ReplyFormat) -> None:
        encoders = [
            self.encoder(session, reply_format, number * len(session.texts)) for number, session in enumerate(sessions)
        ]
        await _all_of([self._stream_events(*each) for each in zip(sessions, encoders, strict=True)])
        pairs = zip(sessions, encoders, strict=True)
        end = encoders[0].end(replies.total_usage([session.usage(encoder.choices) for session, encoder in pairs]))
        await self._send({"type": "http.response.body", "body": end})

    async def _stream_events(self, session: RequestSession, events: StreamEncoder) -> None:
        request = session.request
        loop, written_at = asyncio.get_running_loop(), 0.0
        while not request.is_finished:
            deltas = await request.next()
            if not self._has_begun:
                await self._begin(200, _EVENTS)
            body = events.of(deltas) if deltas else events.keep_alive()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            last_at, written_at = written_at, loop.time()
            is_fast = len(deltas) > len(session.texts) or written_at - last_at < self._write_gap_s
            if is_fast and not request.is_finished:
                await request.pause(self._write_gap_s)
        await request.settled(SETTLE_TIMEOUT_S)


class StreamEncoder(Protocol):
    """The events of a streamed answer."""

    choices: tuple[ChoiceReader, ...]

    def keep_alive(self) -> bytes: ...

    def of(self, deltas: Iterable[TokenDelta]) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...


async def _whole_answer(session: RequestSession, reply_format: ReplyFormat, held: ShareAccount) -> Answer:
    """The answer to a prompt; ``held`` counts what may be many times the answer's text."""
    request, readers = session.request, session.choices()
    logprobs = LogprobFormatter.for_session(session, is_chat=reply_format.is_chat)
    held.take(len(session.echo.encode()) * len(session.texts))
    if request.prompt_scores is not None:
        held.take(request.prompt_scores.num_bytes(request.resolved.sampling.prompt_logprobs))
    choices = [ChoiceBuffer([session.echo] if session.echo else []) for _ in readers]
    while not request.is_finished:
        for delta in await request.next():
            choice = choices[delta.choice]
            choice.token_ids += delta.token_ids
            choice.finish = delta.finish
            for step in readers[delta.choice].read(delta):
                choice.parts += step.parts
                if logprobs is not None and step.scored is not None:
                    choice.logprobs.append(logprobs.encoded(step.scored))
                    choice.logprob_sum += step.scored.logprobs.chosen
                    held.take(sum(map(len, choice.logprobs[-1])))
                    choice.num_parts.append(len(choice.parts))
    await request.settled(SETTLE_TIMEOUT_S)
    usage = session.usage(readers)
    if reply_format.num_best:
        choices = sorted(choices, key=ChoiceBuffer.mean_logprob, reverse=True)[: reply_format.num_best]
    scores = None
    if session.scored_by is not None:
        scores = await prompt_logprobs(session, reply_format.num_echoed_top, reply_format.num_prompt_top, held)
    return Answer(request.resolved, choices, usage, logprobs if reply_format.has_logprobs else None, scores)


async def _all_of(parts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all parts, which run at once. Raises the first error, and cancels the other parts then."""
    if len(parts) == 1:
        return [await parts[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def encoded_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI has them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


class SseEncoder:
    """Encodes token deltas as server-sent events."""

    def __init__(self, session: RequestSession, reply_format: ReplyFormat, reply_id: str, first_index: int) -> None:
        self.choices = session.choices()
        self._reply = StreamReply(session.request.resolved, reply_format, reply_id, first_index)
        self._logprobs = LogprobFormatter.for_session(session, is_chat=reply_format.is_chat)
        self._session = session
        self._shows_reasoning = reply_format.shows_reasoning
        self._has_annotations = self._logprobs is not None or reply_format.return_token_ids
        self._unstarted = set(range(len(self.choices)))  # choices without a first event

    def keep_alive(self) -> bytes:
        return replies.comment(self._session.request.waits_for)

    def end(self, usage: Usage) -> bytes:
        return self._reply.usage(usage) + replies.DONE

    def of(self, deltas: Iterable[TokenDelta]) -> bytes:
        """An event per token, preceded by a role and followed by a finish event for each choice."""
        events: list[bytes] = []
        for delta in deltas:
            choice = delta.choice
            if choice in self._unstarted:
                self._unstarted.discard(choice)
                events.append(self._reply.opening(choice, self._session.echo))
            for step in self.choices[choice].read(delta):
                if step.token_id is not None:
                    events += self._events(choice, step, step.token_id)
                elif delta.finish is not None:
                    events += self._last_events(choice, step, delta.finish)
        return b"".join(events)

    def _events(self, choice: int, step: Step, token_id: int) -> Iterator[bytes]:
        """The events of the parts that a token completes, of which there is at least one."""
        parts = self._shown(step.parts)
        last = parts[-1] if parts else ""
        content = last if isinstance(last, str) else ""
        yield from (self._reply.part(choice, part) for part in (parts[:-1] if content else parts))
        if content or not parts or self._has_annotations:
            logprobs = None
            if self._logprobs is not None and step.scored is not None:
                logprobs = self._logprobs.of([self._logprobs.encoded(step.scored)])
            yield self._reply.token(choice, content, token_id, logprobs)

    def _last_events(self, choice: int, end: Step, finish: FinishCause) -> Iterator[bytes]:
        reader = self.choices[choice]
        if not reader.is_divided:
            yield self._reply.finish(choice, end.content, str(finish))
            return
        yield from (self._reply.part(choice, part) for part in self._shown(end.parts))
        yield self._reply.finish(choice, "", replies.finish_reason(finish, reader.num_calls))

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        return parts if self._shows_reasoning else [part for part in parts if not isinstance(part, Reasoning)]
