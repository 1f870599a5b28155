"""Workers that speak the real protocols but compute nothing: they answer with the prompt.

The token at a position depends on (prompt, seed, choice, position) alone, as a real sampler's does, so a resumed
attempt goes on with the same tokens. Every engine step sends one message per gateway with all its requests' tokens.
What tests want to happen is set on the objects: pauses, refusals, errors, deaths.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from tokenizers import Tokenizer

from tests.support.partial_service import serve
from tests.support.token_decoders import decoder_of
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.common.tokens.stop_strings import StopChecker
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2

NUM_DIMENSIONS = 8  # of embeddings
Key: TypeAlias = tuple[str, int]
Answer: TypeAlias = Callable[[Sequence[int], int, int, int], int]  # prompt, seed, choice, position -> token


def echo(prompt: Sequence[int], seed: int, choice: int, position: int) -> int:
    """The prompt over and over; each choice begins one token later."""
    return prompt[(position + choice) % len(prompt)]


def embedding_of(prompt: Sequence[int]) -> list[float]:
    """A vector whose length is not 1 and which depends on the order of the prompt."""
    return [
        float(sum((place + 1) * token for place, token in enumerate(prompt)) % (7 + size)) - 2.5
        for size in range(NUM_DIMENSIONS)
    ]


def token_logprobs(token: int, position: int, num_top: int) -> pb.TokenLogprobs:
    """Logarithms that a test can foresee: the chosen one's by position, the likeliest are the tokens from 2 on."""
    values = [-0.25 * (place + 1) for place in range(num_top)]
    return pb.TokenLogprobs(chosen=-position - 0.5, top_token_ids=range(2, 2 + num_top), top_logprobs=values)


@dataclass(slots=True)
class EchoModel:
    """The state shared by all workers of a test."""

    answer: Answer = echo
    tokenizer: Tokenizer | None = None  # needed for stop strings
    step_s: float = 0.0
    prompts: dict[Key, Sequence[int]] = field(default_factory=dict)  # the "KV" handed over
    streams: set[_Gateway] = field(default_factory=set)

    def wake(self) -> None:
        """Something changed that a waiting stream may go on with."""
        for stream in self.streams:
            stream.filled.set()


@dataclass(slots=True, eq=False)
class _Choice:
    """A choice that a worker runs."""

    start: pb.AttemptStart
    choice: int
    position: int
    checker: StopChecker | None

    def step(self, model: EchoModel, prompt: Sequence[int]) -> pb.ChoiceOutput:
        sampling = self.start.sampling
        token = model.answer(prompt, sampling.seed, self.choice, self.position)
        output = pb.ChoiceOutput(
            key=self.start.key, choice=self.choice, first_position=self.position, token_ids=(token,)
        )
        if sampling.HasField("top_logprobs"):
            output.logprobs.append(token_logprobs(token, self.position, sampling.top_logprobs))
        self.position += 1
        if token in sampling.stop_token_ids or (self.checker is not None and self.checker.step(token)):
            output.finish_reason = pb.FINISH_REASON_STOP
        elif self.position >= sampling.max_tokens:
            output.finish_reason = pb.FINISH_REASON_LENGTH
        return output


class _Gateway:
    """A gateway's stream at a role."""

    def __init__(self) -> None:
        self.running: dict[Key, list[_Choice]] = {}
        self.beat_every_s: float | None = None
        self.outputs: list[pb.ChoiceOutput] = []  # to be sent with the next step
        self.filled = asyncio.Event()


def _key(start: pb.AttemptStart | pb.CancelAttempt | pb.RecallAttempt) -> Key:
    return start.key.request_id, start.key.attempt


class EchoWorker:
    """A worker with both roles. ``pause_at`` holds decoding back at a position; ``errors`` answer the next starts."""

    def __init__(self, worker_id: str, model: EchoModel) -> None:
        self.worker_id = worker_id
        self.model = model
        self.starts: list[tuple[str, pb.AttemptStart]] = []  # (role, start)
        self.cancelled: list[tuple[str, Key]] = []
        self.recalled: list[tuple[str, Key]] = []
        self.errors: dict[str, list[pb.RunError]] = {"prefill": [], "decode": [], "hand-over": []}
        self.num_cached = 0
        self.prompt_progress: tuple[int, ...] = ()  # prompt tokens computed so far, step by step; then it never ends
        self.pause_at: int | None = None
        self.is_silent = False  # it says nothing, not even that it lives
        self.progress: types_pb2.EngineProgress | None = None  # of its beats; None: it advances all the time
        self.prefill_delay_s = 0.0
        self.may_embed = asyncio.Event()
        self.may_embed.set()
        self.num_streams = 0
        self._num_beats = 0
        self.num_running = 0
        self._server = self._new_server(0)
        self._port = self._server.port

    def _new_server(self, port: int) -> RpcServer:
        server = RpcServer("127.0.0.1", port)
        serve(server, "Prefill/Run", _Role(self, "prefill").Run, pb.RunCommand.FromString)
        serve(server, "Decode/Run", _Role(self, "decode").Run, pb.RunCommand.FromString)
        return server

    @property
    def ref(self) -> types_pb2.WorkerRef:
        address = f"127.0.0.1:{self._port}"
        return types_pb2.WorkerRef(worker_id=self.worker_id, grpc_address=address, instance_id=f"i-{self.worker_id}")

    async def start(self) -> None:
        await self._server.start()

    def resume(self) -> None:
        """Ends a pause."""
        self.pause_at = None
        self.model.wake()

    def beat(self) -> types_pb2.EngineProgress:
        self._num_beats += 1
        return self.progress or types_pb2.EngineProgress(num_advances=self._num_beats, has_work=True)

    async def kill(self) -> None:
        """Breaks every stream at once."""
        await self._server.server.stop(None)

    async def revive(self) -> None:
        """Comes back on its port after ``kill``, with nothing running."""
        self._server = self._new_server(self._port)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def checker(self, start: pb.AttemptStart, forced: Sequence[int]) -> StopChecker | None:
        if not start.sampling.stop_strings:
            return None
        assert self.model.tokenizer is not None
        checker = StopChecker(
            decoder_of(self.model.tokenizer), start.sampling.stop_strings, start.prompt_end, start.sampling.min_tokens
        )
        for token in forced:
            checker.step(token)
        return checker


class _Role:
    """``Run`` of one role of one worker."""

    def __init__(self, worker: EchoWorker, role: str) -> None:
        self._worker = worker
        self._role = role

    async def Run(self, requests: AsyncIterator[pb.RunCommand], context: object) -> AsyncIterator[pb.StepOutput]:
        gateway = _Gateway()
        reader = asyncio.ensure_future(self._read(requests, gateway))
        reader.add_done_callback(lambda _: gateway.filled.set())
        self._worker.num_streams += 1
        self._worker.model.streams.add(gateway)
        try:
            while not reader.done():
                outputs = [] if self._worker.is_silent else self._step(gateway)
                if outputs:
                    yield pb.StepOutput(outputs=outputs)
                    await asyncio.sleep(self._worker.model.step_s)
                    continue
                gateway.filled.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(gateway.beat_every_s):
                        await gateway.filled.wait()
                if not gateway.filled.is_set() and not self._worker.is_silent:
                    yield pb.StepOutput(beat=self._worker.beat())
        finally:
            self._worker.num_streams -= 1
            self._worker.model.streams.discard(gateway)
            self._worker.num_running -= len(gateway.running)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _step(self, gateway: _Gateway) -> list[pb.ChoiceOutput]:
        outputs, gateway.outputs = gateway.outputs, []
        worker = self._worker
        for key, choices in list(gateway.running.items()):
            prompt = worker.model.prompts.get(key)
            if prompt is None:  # its KV is not here yet
                continue
            for choice in list(choices):
                if worker.pause_at is not None and choice.position >= worker.pause_at:
                    continue
                output = choice.step(worker.model, prompt)
                outputs.append(output)
                if output.finish_reason:
                    choices.remove(choice)
            if not choices:
                self._forget(gateway, key)
        return outputs

    def _forget(self, gateway: _Gateway, key: Key) -> None:
        if gateway.running.pop(key, None) is not None:
            self._worker.num_running -= 1
            self._worker.model.prompts.pop(key, None)

    async def _read(self, requests: AsyncIterator[pb.RunCommand], gateway: _Gateway) -> None:
        hello = await anext(aiter(requests))
        assert hello.HasField("hello"), "the first message must be hello"
        gateway.beat_every_s = hello.hello.beat_every_s or None
        gateway.filled.set()
        async for command in requests:
            if command.HasField("start"):
                self._worker.starts.append((self._role, command.start))
                await self._start(command.start, gateway)
            elif command.HasField("recall"):
                self._worker.recalled.append((self._role, _key(command.recall)))
                self._forget(gateway, _key(command.recall))
            else:
                self._worker.cancelled.append((self._role, _key(command.cancel)))
                self._forget(gateway, _key(command.cancel))
            gateway.filled.set()

    async def _start(self, start: pb.AttemptStart, gateway: _Gateway) -> None:
        worker = self._worker
        if worker.errors[self._role]:
            error = worker.errors[self._role].pop(0)
            gateway.outputs += [
                pb.ChoiceOutput(key=start.key, choice=choice.choice, finish_reason=pb.FINISH_REASON_ERROR, error=error)
                for choice in start.choices
            ]
        elif self._role == "prefill":
            await self._prefill(start, gateway)
        else:
            choices = [
                self._choice(start, choice, len(choice.forced_output) + 1, start.prompt) for choice in start.choices
            ]
            gateway.running[_key(start)] = choices
            worker.num_running += 1

    async def _prefill(self, start: pb.AttemptStart, gateway: _Gateway) -> None:
        if self._worker.prompt_progress:
            gateway.outputs += [
                pb.ChoiceOutput(
                    key=start.key, num_prompt_tokens=computed, num_cached_prompt_tokens=self._worker.num_cached
                )
                for computed in self._worker.prompt_progress
            ]
            return
        began_us = time.time_ns() // 1000
        model, prompt = self._worker.model, tuple(start.prompt)
        if start.pooling:
            await asyncio.sleep(self._worker.prefill_delay_s)
            await self._worker.may_embed.wait()
            gateway.outputs.append(
                pb.ChoiceOutput(
                    key=start.key,
                    finish_reason=pb.FINISH_REASON_STOP,
                    embedding=struct.pack(f"<{NUM_DIMENSIONS}f", *embedding_of(prompt)),
                    num_prompt_tokens=len(prompt),
                    num_cached_prompt_tokens=self._worker.num_cached,
                )
            )
            return
        outputs = []
        for choice in start.choices:
            outputs.append(self._choice(start, choice, len(choice.forced_output), prompt).step(model, prompt))
            outputs[-1].num_cached_prompt_tokens = self._worker.num_cached
        ended_us = time.time_ns() // 1000
        outputs[0].phases.append(types_pb2.Phase(name="prefill", begin_unix_us=began_us, end_unix_us=ended_us))
        if self._worker.errors["hand-over"]:  # the first tokens go out, the KV does not
            error = self._worker.errors["hand-over"].pop(0)
            reason = pb.FINISH_REASON_ERROR
            outputs += [
                pb.ChoiceOutput(key=start.key, choice=choice.choice, finish_reason=reason, error=error)
                for choice in start.choices
            ]
        elif not all(output.finish_reason for output in outputs):
            model.prompts[_key(start)] = prompt
            model.wake()
        await asyncio.sleep(self._worker.prefill_delay_s)
        gateway.outputs += outputs

    def _choice(self, start: pb.AttemptStart, choice: pb.ChoiceStart, position: int, prompt: Sequence[int]) -> _Choice:
        checker = self._worker.checker(start, choice.forced_output)
        return _Choice(start, choice.choice, position, checker)
