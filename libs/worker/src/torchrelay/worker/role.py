"""The base of the prefill and decode roles: streams from gateways in, outputs of engine steps out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

import grpc

from torchrelay.common.errors import Conflict, InvalidRequest, Overloaded, TorchrelayError, Unavailable
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.quantities import format_count
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.engine.core import NO_TOKEN, Embedding, Finish, GroupAdapter, NewToken, PromptLogprobs, PromptProgress
from torchrelay.transfer.buffers import Buffer
from torchrelay.transfer.fetch.follow import Receiver
from torchrelay.transfer.transport.interface import Transport
from torchrelay.worker.attempts.attempt import (
    DEADLINE_ERROR,
    Attempt,
    dispatch_outputs,
    group_id_of,
    no_token_error,
)
from torchrelay.worker.attempts.hosted_adapters import HostedAdapters, Reserve
from torchrelay.worker.attempts.hosted_tokenizer import HostedTokenizer
from torchrelay.worker.attempts.outbox import Outbox
from torchrelay.worker.attempts.usage_publisher import UsagePublisher
from torchrelay.worker.metrics.step_metrics import StepMetrics
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.engine_thread import EngineThread
from torchrelay.worker.slot.slot import Slot

log = get_logger(__name__)
MIN_BEAT_S = 0.1  # even if a peer asks for more frequent beats


class RoleContext(Protocol):
    """The part of ``Worker`` that a role uses. All methods run on the event loop; ``Worker`` describes them."""

    settings: WorkerSettings
    tls: Tls | None
    slot: Slot
    engine: EngineThread
    tokenizers: HostedTokenizer
    adapters: HostedAdapters
    usage: UsagePublisher
    step_metrics: StepMetrics
    buffers: dict[str, Buffer]  # served by the data plane, by buffer id
    receiver: Receiver
    transport: Transport

    @property
    def data_address(self) -> str: ...
    def role(self, number: types_pb2.Role.ValueType) -> WorkerRole | None: ...
    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...
    def cancel(self, group_id: str, choice: int | None = None) -> None: ...
    def pages_freed(self) -> None: ...
    def attempt_ended(self) -> None: ...
    def progress(self) -> types_pb2.EngineProgress: ...


class WorkerRole(ABC):
    """A role of a worker: serves ``Run`` streams and turns engine tokens into outputs.

    A role package registers its subclass as an entry point of the group ``torchrelay.roles``.
    """

    number: ClassVar[types_pb2.Role.ValueType]

    def __init__(self, worker: RoleContext) -> None:
        self.worker = worker
        self.attempts: dict[str, Attempt] = {}  # the running ones, by group id
        self._awaited_starts: dict[str, set[asyncio.Future[Attempt]]] = {}  # a future of each waiter

    @property
    def num_awaited_starts(self) -> int:
        """Attempts that another worker has named and that their gateway has not started here yet."""
        return len(self._awaited_starts)

    @property
    def num_kv_transfers(self) -> int:
        """Attempts whose KV this role is sending or receiving."""
        return 0

    @abstractmethod
    def register(self, server: RpcServer) -> None:
        """Adds the role's servicer and its allowed callers to the server."""

    @abstractmethod
    async def begin(self, attempt: Attempt) -> None:
        """Starts an attempt that is already in ``attempts``. Raises ``TorchrelayError``."""

    @abstractmethod
    def drop(self, attempt: Attempt) -> None:
        """Frees the role's resources of an attempt that has ended, for any reason."""

    @abstractmethod
    def delivers(self, attempt: Attempt, token: NewToken) -> bool:
        """Whether this role delivers ``token``."""

    def record_phases(self, attempt: Attempt) -> None:  # noqa: B027  (an optional hook)
        """Adds the phases that have just ended to ``attempt.phases``, before each delivered token."""

    def on_delivered(self, attempt: Attempt, token: NewToken, finish: Finish | None) -> None:  # noqa: B027
        """Reacts to a delivered token."""

    def prefilled(self, group_ids: Iterable[str]) -> None:  # noqa: B027
        """Reacts to prompts that the engine has computed."""

    def advance_prompts(self, prompts: Sequence[PromptProgress]) -> None:  # noqa: B027
        """Reports the prompts that a step has advanced without ending them."""

    def deliver_prompt_logprobs(self, scores: Sequence[PromptLogprobs]) -> None:  # noqa: B027
        """Sends the logprobs of parts of prompts to their gateways."""

    def deliver_embeddings(self, embeddings: Sequence[Embedding]) -> None:  # noqa: B027
        """Sends the embeddings of one engine step to their gateways; their attempts have ended."""

    def pages_freed(self) -> None:  # noqa: B027
        """Reacts to KV pages that may have been freed."""

    def keeps_prompt(self, group_id: str) -> bool:
        """Whether a recalled prompt of this group is kept, or will be when its recall arrives."""
        return False

    def is_done(self, attempt: Attempt) -> bool:
        """Whether an attempt can be forgotten once its last choice has finished."""
        return True

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Runs the role's background work."""
        yield

    # -- streams -----------------------------------------------------------------------------------------------------

    async def Run(self, requests: AsyncIterator[pb.RunCommand], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serves a gateway's stream; its end cancels the gateway's attempts."""
        hello = await anext(aiter(requests), None)
        if hello is None or not hello.HasField("hello"):
            raise InvalidRequest("the first message of a Run stream must be hello", field="hello")
        outbox = Outbox(hello.hello.gateway_id)
        writers = [asyncio.ensure_future(self._write(outbox, context))]
        if hello.hello.beat_every_s > 0:
            writers.append(asyncio.ensure_future(self._beat(outbox, hello.hello.beat_every_s)))
        try:
            async with asyncio.TaskGroup() as starts:
                async for command in requests:
                    self._apply(command, outbox, starts)
        finally:
            for writer in writers:
                writer.cancel()
            for attempt in [each for each in self.attempts.values() if each.outbox is outbox]:
                self.end(attempt, pb.FINISH_REASON_CANCELLED)
            await asyncio.gather(*writers, return_exceptions=True)

    async def wait_for_start(self, group_id: str) -> Attempt:
        """Waits until a gateway has started the attempt here. Raises ``Unavailable`` if none sends it in time, and
        ``Conflict`` if it ends before it has read what it needs.
        """
        attempt = self.attempts.get(group_id)
        if attempt is not None and attempt.is_started:
            return attempt
        timeout_s = self.worker.settings.start_timeout_s
        future: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
        waiters = self._awaited_starts.setdefault(group_id, set())
        waiters.add(future)
        try:
            await asyncio.wait((future,), timeout=timeout_s)
            if not future.done() and group_id not in self.attempts:
                raise Unavailable(f"no gateway started {group_id} here within {timeout_s:g} s")
            return await future
        finally:
            waiters.remove(future)
            if not waiters:
                del self._awaited_starts[group_id]

    async def _write(self, outbox: Outbox, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await context.write(await outbox.take())

    async def _beat(self, outbox: Outbox, every_s: float) -> None:
        while True:
            outbox.put_beat(self.worker.progress())
            await asyncio.sleep(max(every_s, MIN_BEAT_S))

    def _apply(self, command: pb.RunCommand, outbox: Outbox, starts: asyncio.TaskGroup) -> None:
        if command.HasField("start"):
            starts.create_task(self._start(command.start, outbox))
        elif command.HasField("cancel") and (attempt := self.attempts.get(group_id_of(command.cancel.key))):
            self.end(attempt, pb.FINISH_REASON_CANCELLED)
        elif command.HasField("recall") and (attempt := self.attempts.get(group_id_of(command.recall.key))):
            self.recall(attempt)

    async def _start(self, start: pb.AttemptStart, outbox: Outbox) -> None:
        attempt = Attempt(start, outbox, {})
        running = self.attempts.get(attempt.group_id)
        if running is not None:
            if running.outbox is not outbox:  # its tokens go to the other stream, so this stream must not wait
                text = "the attempt already runs on another stream"
                outbox.put(attempt.failure(pb.RunError(code=pb.RunError.CODE_WRONG_INSTANCE, message=text)))
            return
        hosted = self.worker.slot.serving_instance(start.instance_id, self.number)
        if hosted is None:
            outbox.put(attempt.failure(self._not_serving_error(start.instance_id)))
            return
        if len(self.attempts) >= self.worker.settings.max_attempts:
            text = f"this worker already runs {format_count(len(self.attempts), 'attempt')}"
            outbox.put(attempt.failure(pb.RunError(code=pb.RunError.CODE_WRONG_INSTANCE, message=text)))
            return
        self.attempts[attempt.group_id] = attempt
        self.watch_deadline(attempt)
        try:
            attempt.stops = await self.worker.tokenizers.checkers(
                hosted.version.tokenizer_digest,
                list(start.sampling.stop_strings),
                list(start.prompt_end),
                {choice.choice: list(choice.forced_output) for choice in start.choices},
                start.sampling.min_tokens,
            )
            if start.sampling.grammar:
                attempt.grammar = await self.worker.tokenizers.grammar(
                    hosted.version.tokenizer_digest, start.sampling.grammar
                )
            await hosted.settled.wait()  # a loading instance takes requests once it is mapped
            if start.HasField("adapter"):
                attempt.adapter = await self.worker.adapters.get(start.instance_id, start.adapter, self._read_adapter)
            if self.is_running(attempt):
                attempt.is_started = True
                for future in self._awaited_start(attempt):
                    future.set_result(attempt)
                await self.begin(attempt)
        except TorchrelayError as error:
            self.fail(attempt, pb.RunError(code=_code_of(error), message=error.message))
        except Exception as error:
            self.fail_unexpected(attempt, error)

    def _awaited_start(self, attempt: Attempt) -> list[asyncio.Future[Attempt]]:
        """The futures of all that wait for the attempt's start."""
        return [future for future in self._awaited_starts.get(attempt.group_id, ()) if not future.done()]

    async def _read_adapter(self, adapter_id: str, document: bytes, weights: bytes, reserve: Reserve) -> GroupAdapter:
        engine = self.worker.engine
        reader = await asyncio.to_thread(engine.require_instance().adapter_reader, adapter_id, document, weights)
        reserve(reader.num_bytes)
        while await engine.call(reader.read_part):  # with steps between the parts
            pass
        return reader.read()

    def is_running(self, attempt: Attempt) -> bool:
        """Whether the attempt has not been cancelled, failed or ended; ask again after every await."""
        return self.attempts.get(attempt.group_id) is attempt

    def _not_serving_error(self, instance_id: str) -> pb.RunError:
        slot = self.worker.slot
        if slot.failed_instance_id == instance_id:
            return pb.RunError(code=pb.RunError.CODE_LOAD_FAILED, message=slot.error)
        text = f"{instance_id} does not take requests on {self.worker.settings.worker_id}"
        return pb.RunError(code=pb.RunError.CODE_WRONG_INSTANCE, message=text)

    def watch_deadline(self, attempt: Attempt) -> None:
        """Ends the attempt at its deadline, if it has one."""
        if (left_s := attempt.left_s()) is not None:
            loop = asyncio.get_running_loop()
            attempt.deadline = loop.call_later(max(0.0, left_s), self.fail, attempt, DEADLINE_ERROR)

    def spawn(self, attempt: Attempt, work: Coroutine[Any, Any, None], name: str) -> None:
        """Runs ``work`` for an attempt in the background; an unexpected error ends the attempt."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self.fail_unexpected(attempt, error)

        self.worker.spawn(run(), f"{name} {attempt.group_id}")

    # -- outputs -----------------------------------------------------------------------------------------------------

    def deliver(self, tokens: Sequence[NewToken]) -> None:
        """Sends this role's tokens of one engine step to their gateways."""
        outputs: list[tuple[Outbox, pb.ChoiceOutput]] = []
        for token in tokens:
            attempt = self.attempts.get(token.group_id)
            if attempt is None or token.choice not in attempt.open_choices:
                continue
            if token.token_id == NO_TOKEN:
                self.fail(attempt, no_token_error(token))
                continue
            try:
                output = self._advance(attempt, token)
            except TorchrelayError as error:
                self.fail(attempt, pb.RunError(code=_code_of(error), message=error.message))
                continue
            except Exception as error:  # the other tokens of this step must not be lost
                self.fail_unexpected(attempt, error)
                continue
            if output is not None:
                outputs.append((attempt.outbox, output))
        dispatch_outputs(outputs)

    def _advance(self, attempt: Attempt, token: NewToken) -> pb.ChoiceOutput | None:
        """Advances an attempt by one token; returns its output if this role delivers it."""
        finish, output = attempt.finish_of(token), None
        if self.delivers(attempt, token):
            self.record_phases(attempt)
            output = attempt.output(token, finish)
            self.worker.usage.advance(attempt, output)
            self.on_delivered(attempt, token, finish)
        if finish is not None:
            self._finish(attempt, token)
        return output

    def _finish(self, attempt: Attempt, token: NewToken) -> None:
        attempt.open_choices.discard(token.choice)
        if token.finish is None:  # a stop string, which the engine does not know
            self.worker.cancel(token.group_id, token.choice)
        if not attempt.open_choices and self.is_done(attempt):
            self.forget(attempt)

    def forget(self, attempt: Attempt) -> bool:
        """Drops an attempt; returns False if it was dropped before."""
        if self.attempts.pop(attempt.group_id, None) is None:
            return False
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        for future in self._awaited_start(attempt):
            future.set_exception(Conflict("the attempt ended before it started"))
        self.drop(attempt)
        self.worker.attempt_ended()
        return True

    def end(self, attempt: Attempt, cause: pb.FinishReason.ValueType) -> None:
        """Stops an attempt that its gateway no longer wants; sends nothing."""
        if self.forget(attempt):
            self.worker.cancel(attempt.group_id)
            self.worker.usage.forget(attempt, cause)

    def recall(self, attempt: Attempt) -> None:
        """Drops an attempt that continues elsewhere; ends its group, unless the prefill role keeps the prompt."""
        if self.forget(attempt):
            self.worker.usage.forget(attempt, pb.FINISH_REASON_CANCELLED)
            prefill = self.worker.role(types_pb2.ROLE_PREFILL)
            if prefill is None or not prefill.keeps_prompt(attempt.group_id):
                self.worker.cancel(attempt.group_id)

    def fail(self, attempt: Attempt, error: pb.RunError) -> None:
        """Ends an attempt with an error for its gateway."""
        if self.forget(attempt):
            name = pb.RunError.Code.Name(error.code)
            log.warning("attempt_failed", group_id=attempt.group_id, code=name, why=error.message)
            self.worker.cancel(attempt.group_id)
            attempt.outbox.put(attempt.failure(error))
            self.worker.usage.forget(attempt, pb.FINISH_REASON_ERROR)

    def expire(self, group_ids: Iterable[str]) -> None:
        """Ends the attempts that the engine reported as past their deadlines."""
        for group_id in group_ids:
            if attempt := self.attempts.get(group_id):
                self.fail(attempt, DEADLINE_ERROR)

    def fail_unexpected(self, attempt: Attempt, error: Exception) -> None:
        """Ends an attempt with an internal error; the stream's other attempts continue."""
        log.error("attempt_broke", group_id=attempt.group_id, exc_info=error)
        self.fail(attempt, pb.RunError(code=pb.RunError.CODE_INTERNAL, message="the worker could not run the request"))

    def fail_all(self, error: pb.RunError) -> None:
        for attempt in tuple(self.attempts.values()):
            self.fail(attempt, error)


def load_roles(names: Sequence[str], context: RoleContext) -> list[WorkerRole]:
    """The installed roles of these names. Raises ``InvalidRequest`` naming the package to install."""
    installed = {point.name: point for point in entry_points(group="torchrelay.roles")}
    for name in names:
        if name not in installed:
            raise InvalidRequest(f"role {name!r} is not installed: pip install torchrelay-{name}", field="roles")
    return [installed[name].load()(context) for name in names]


def _code_of(error: TorchrelayError) -> pb.RunError.Code.ValueType:
    """The code that tells the gateway to try elsewhere or to give up."""
    if isinstance(error, Conflict | Overloaded):
        return pb.RunError.CODE_WRONG_INSTANCE
    if isinstance(error, Unavailable):
        return pb.RunError.CODE_LOAD_FAILED
    return pb.RunError.CODE_INTERNAL
