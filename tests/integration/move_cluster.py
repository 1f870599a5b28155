"""A loading worker, the next prefill worker, a decode worker and a real gateway in one process, placed by the test.

The scheduler is scripted, so that a test decides when a prompt moves. The gateway's part is real: it starts, recalls,
retries, cancels and bills.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.integration.roles_testbed import DECODE, PREFILL, RunningWorker, model_version, running_test_worker
from tests.support.callers import every_token
from tests.support.echo_services import EchoScheduler
from tests.support.gateway_ports import PRINCIPAL, InMemoryPorts, published_model
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model
from tests.unit.param_store.running_store import CLUSTER_KEY, OFFICE, REMOTE, publish, running_store
from torchrelay.common.clock import now_unix_us
from torchrelay.common.errors import TorchrelayError
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.sampling import shared_sampling
from torchrelay.common.tokens.text_stream import prompt_end
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.common.tokens.tokenizer import load_decoder
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import param_store_pb2, scheduler_pb2, types_pb2
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.gateway.background import background
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.inference.core import LogprobDelta, ResolvedRequest
from torchrelay.gateway.inference.execution.admission_stream import AdmissionStream
from torchrelay.gateway.inference.execution.attempt import Upstreams
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter
from torchrelay.gateway.inference.execution.running_request import RunningRequest
from torchrelay.gateway.inference.execution.worker_streams import RunStream, WorkerStreams
from torchrelay.prefill.role import PrefillRole
from torchrelay.worker.slot.slot import FREE, LOADING, READY

CLOSED_ADDRESS, MODEL = "127.0.0.1:1", "acme/moved"


class GatedStore:
    """Stands before a store that has the pack, and tells its worker only of the segments that the test opens."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._changed = asyncio.Event()
        self.num_open, self.fault = 0, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    def close_segments(self) -> None:
        """Prepares for another load, of which nothing has arrived."""
        self.num_open, self.fault = 0, ""

    def open_segments(self, num_open: int) -> None:
        self.num_open = max(self.num_open, num_open)
        self._notify()

    def fail(self, fault: str) -> None:
        """Ends the load."""
        self.fault = fault
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    def Hold(self, request: param_store_pb2.HoldRequest, **options: Any) -> GatedHold:
        return GatedHold(self, self._stub.Hold(request, **options))


class GatedHold:
    """The replies of a hold, as the gate lets them through."""

    def __init__(self, store: GatedStore, call: Any) -> None:
        self.cancel = call.cancel
        self._replies = self._gated(store, aiter(call))

    def __aiter__(self) -> AsyncIterator[param_store_pb2.HoldReply]:
        return self._replies

    @staticmethod
    async def _gated(
        store: GatedStore, replies: AsyncIterator[param_store_pb2.HoldReply]
    ) -> AsyncIterator[param_store_pb2.HoldReply]:
        last, num_told = await anext(replies), -1
        while num_told < last.num_segments_ready:
            if store.fault:
                yield param_store_pb2.HoldReply(error=store.fault)
            elif (num_ready := min(store.num_open, last.num_segments_ready)) > num_told:
                num_told = num_ready
                told = param_store_pb2.HoldReply()
                told.CopyFrom(last)
                told.num_segments_ready = num_ready
                yield told
            else:
                await store.changed()
        async for reply in replies:
            yield reply


@dataclass(frozen=True)
class Prompt:
    """A request, and its answer by workers that are whole."""

    name: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int = 1
    stop_strings: tuple[str, ...] = ()
    expected: tuple[tuple[int, ...], ...] = ()  # by choice
    causes: tuple[FinishCause, ...] = ()
    logprobs: tuple[tuple[float, ...], ...] = ()
    prompt_logprobs: tuple[float, ...] = ()


@dataclass(eq=False)
class Answer:
    """A request under way at the gateway, and its tokens and bill."""

    prompt: Prompt
    request_id: str
    tenant_id: str
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: list[float] = field(default_factory=list)
    error: TorchrelayError | None = None
    progress: list[int] = field(default_factory=list)  # prompt tokens that workers have reported before the first token
    imports: list[str] = field(default_factory=list)  # the detail of each import
    attempts_with_tokens: set[int] = field(default_factory=set)
    task: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        return all(
            tuple(self.tokens[choice]) == self.prompt.expected[choice] for choice in range(self.prompt.num_choices)
        )


class MoveScheduler(EchoScheduler):
    """Places a first attempt on the loading worker, and a recalled one on the other worker with its source."""

    def __init__(self, cluster: MoveCluster) -> None:
        super().__init__([])
        self.cluster = cluster
        self.placed: dict[str, tuple[types_pb2.AttemptKey, RunningWorker]] = {}  # by request: the last placement
        self.kept: dict[str, tuple[types_pb2.AttemptKey, RunningWorker]] = {}  # by request: what its next one continues
        self.decode_of: Callable[[RunningWorker], RunningWorker] = lambda prefill: cluster.decode
        self.source_address = ""  # of each source; empty: its own
        self.wait_ms: Callable[[], int] = lambda: 0
        self.begins_at_next = False

    async def recall_prompt(self, request_id: str, keeps_prompt: bool = True) -> bool:
        """Recalls the last placed attempt of a request; False if it is not placed."""
        if request_id not in self.placed:
            return False
        key, worker = self.placed[request_id]
        if keeps_prompt:
            self.kept[request_id] = key, worker
        await self.recall(key, keeps_prompt)
        return True

    async def _place(self, request: scheduler_pb2.AdmitRequest, events: Any) -> None:
        if request.HasField("current"):
            return
        cluster, request_id = self.cluster, request.key.request_id
        placement = scheduler_pb2.Placement(key=request.key)
        kept = self.kept.pop(request_id, None)
        if kept is not None and kept[1] is cluster.next and cluster.is_serving(cluster.source):
            prefill = cluster.source
        elif kept is not None or request.key.attempt > 1 or self.begins_at_next:
            prefill = cluster.next
        else:
            prefill = cluster.source if cluster.is_serving(cluster.source) else cluster.next
        await eventually(lambda: cluster.is_serving(prefill), "the reload of a worker")
        decode = self.decode_of(prefill)
        await eventually(lambda: cluster.is_serving(decode), "the reload of a worker")
        placement.prefill.CopyFrom(worker_ref(prefill))
        placement.decode.CopyFrom(worker_ref(decode))
        expires_unix_ms = int(time.time() * 1000) + 60_000
        if prefill is not decode:
            group_id = f"{request_id}/{request.key.attempt}"
            ticket = OFFICE.issue(group_id, worker_id(prefill), worker_id(decode), expires_unix_ms)
            placement.kv_ticket.CopyFrom(ticket)
        if kept is not None and kept[1] is not prefill:
            key, source = kept
            placement.prompt_source.CopyFrom(prompt_source(key, source, receiver_id=worker_id(prefill)))
            placement.prompt_source.worker.grpc_address = self.source_address or source.address
            placement.prompt_source.wait_ms = self.wait_ms()
        self.placed[request_id] = request.key, prefill
        await events.put(scheduler_pb2.AdmitEvent(placement=placement))


def prompt_source(key: types_pb2.AttemptKey, source: RunningWorker, **fields: Any) -> types_pb2.PromptSource:
    """The source of a prompt; ``fields`` of its ticket."""
    buffer_id = f"{key.request_id}/{key.attempt}/prompt"
    expires_unix_ms = int(time.time() * 1000) + 60_000
    values = {"buffer_id": buffer_id, "holder_id": worker_id(source), "expires_unix_ms": expires_unix_ms, **fields}
    return types_pb2.PromptSource(key=key, worker=worker_ref(source), ticket=OFFICE.issue(**values))


def worker_id(worker: RunningWorker) -> str:
    return worker.worker.settings.worker_id


def worker_ref(worker: RunningWorker) -> types_pb2.WorkerRef:
    return types_pb2.WorkerRef(
        worker_id=worker_id(worker),
        grpc_address=worker.address,
        instance_id=worker.instance_id,
        gateway_token=worker.token,
        worker_token=every_token(CLUSTER_KEY, worker_id(worker)),
    )


@dataclass(eq=False)
class MoveCluster:
    """The services. ``source`` loads, ``next`` and ``decode`` are whole."""

    model: Model
    version: types_pb2.ModelVersion
    source: RunningWorker
    next: RunningWorker
    decode: RunningWorker
    gate: GatedStore
    ports: InMemoryPorts
    stack: AsyncExitStack
    decoder: TokenDecoder
    scheduler: MoveScheduler = field(init=False)
    upstreams: Upstreams = field(init=False)
    ledger_writer: LedgerWriter = field(init=False)
    answers: dict[str, Answer] = field(default_factory=dict)
    on_output: Callable[[pb.ChoiceOutput], bool] = lambda output: True  # False: the gateway does not get it

    async def start_gateway(self) -> None:
        self.scheduler = MoveScheduler(self)
        await self.scheduler.start()
        self.stack.push_async_callback(self.scheduler.stop)
        channel = await self.stack.enter_async_context(open_channel(self.scheduler.address))
        admissions = AdmissionStream(SchedulerStub(channel), "gw-1", self.scheduler.address)
        await self.stack.enter_async_context(background(admissions.run()))
        workers = await self.stack.enter_async_context(WorkerStreams("gw-1"))
        self.upstreams = Upstreams(admissions, workers, "gw-1")
        self.ledger_writer = await self.stack.enter_async_context(LedgerWriter(self.ports, self.ports, 1.0))

    @property
    def workers(self) -> tuple[RunningWorker, ...]:
        return self.source, self.next, self.decode

    @property
    def num_segments(self) -> int:
        return len(self.model.pack.manifest.segments)

    @property
    def boundaries(self) -> list[int]:
        """The layers that the source's prompts have reached."""
        instance = self.source.worker.engine.relay_instance
        return [] if instance is None else [group.layer for group in instance.groups()]

    def let_layers(self, num_layers: int) -> None:
        """Opens the embeddings and the first layers at the source."""
        self.gate.open_segments(num_layers + 1)

    def is_serving(self, worker: RunningWorker) -> bool:
        hosted = worker.worker.slot.hosted
        return (
            worker.worker.slot.state in (LOADING, READY)
            and hosted is not None
            and hosted.instance_id == worker.instance_id
        )

    def role(self, worker: RunningWorker) -> PrefillRole:
        role = worker.worker.role(PREFILL)
        assert isinstance(role, PrefillRole)
        return role

    async def reload(self, worker: RunningWorker) -> None:
        """Ends the instance with all of its work, and loads the model again; the source then has no layer."""
        if worker.worker.slot.state != FREE:
            await worker.unload()
            await worker.until_free()
        if worker is self.source:
            self.gate.close_segments()
        worker.instance_id = new_id("ins")
        await worker.load(self.version, [PREFILL, DECODE])
        if worker is not self.source:
            await worker.until_ready()

    async def start_source(self) -> None:
        """Begins another load at the source."""
        await self.reload(self.source)
        hosted = self.source.worker.slot.hosted
        assert hosted is not None
        await hosted.settled.wait()

    async def with_reference(self, prompt: Prompt) -> Prompt:
        """The prompt with its answer, which does not move."""
        self.scheduler.begins_at_next = True
        answer = self.send(prompt, tenant_id="reference")
        usages = await self.finished(answer)
        self.scheduler.begins_at_next = False
        assert answer.error is None
        return replace(
            prompt,
            expected=tuple(tuple(answer.tokens[choice]) for choice in range(prompt.num_choices)),
            causes=tuple(usage.cause for usage in usages),
            logprobs=tuple(tuple(answer.logprobs[choice]) for choice in range(prompt.num_choices)),
            prompt_logprobs=tuple(answer.prompt_logprobs),
        )

    def send(
        self, prompt: Prompt, *, tenant_id: str = PRINCIPAL.tenant_id, deadline_s: float = 0.0, delay_s: float = 0.0
    ) -> Answer:
        """Begins a request at the gateway. A deadline is the caller's."""
        answer = Answer(prompt, new_id("req"), tenant_id)
        self.answers[answer.request_id] = answer
        answer.task = asyncio.ensure_future(self._run(answer, deadline_s))
        return answer

    async def _run(self, answer: Answer, deadline_s: float) -> None:
        prompt, sampling = answer.prompt, answer.prompt.sampling
        model = self.ports.published[MODEL]
        principal = replace(PRINCIPAL, tenant_id=answer.tenant_id)
        reservation = await self.ports.admit(principal, model, len(prompt.tokens), sampling.max_tokens)
        message = pb.Sampling(
            **shared_sampling(sampling),
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            top_logprobs=sampling.top_logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            stop_token_ids=sorted(sampling.stop_token_ids),
            stop_strings=prompt.stop_strings,
        )
        deadline_unix_us = now_unix_us() + int(deadline_s * 1e6) if deadline_s else 0
        resolved = ResolvedRequest(
            answer.request_id,
            principal,
            model,
            prompt.tokens,
            prompt_end(self.decoder, prompt.tokens) if prompt.stop_strings else (),
            message,
            prompt.num_choices,
            now_unix_us(),
            deadline_unix_us,
            is_callers_deadline=True,
        )
        request = RunningRequest(
            resolved, self.upstreams, self.ledger_writer, reservation, max_attempts=100, keep_alive_s=5.0
        )
        request.start()
        try:
            while not request.is_finished:
                for delta in await request.next():
                    answer.tokens[delta.choice] += delta.token_ids
                    if isinstance(delta, LogprobDelta):
                        answer.logprobs[delta.choice] += [each.chosen for each in delta.logprobs]
            if (scores := request.prompt_scores) is not None:
                scores.check()
                answer.prompt_logprobs = [scores.of(each, 0).chosen for each in range(1, len(prompt.tokens))]
        except TorchrelayError as error:
            answer.error = error
        except asyncio.CancelledError:
            request.close(FinishCause.CANCELLED)
            raise
        finally:
            request.close()

    def note(self, output: pb.ChoiceOutput) -> bool:
        """Notes an output that arrives at the gateway; False: it is lost."""
        answer = self.answers.get(output.key.request_id)
        if answer is not None:
            if not output.token_ids and not output.finish_reason:
                answer.progress.append(output.num_prompt_tokens)
            if output.token_ids:
                answer.attempts_with_tokens.add(output.key.attempt)
            answer.imports += [phase.detail for phase in output.phases if phase.name == "import"]
        return self.on_output(output)

    async def finished(self, answer: Answer) -> list[ChoiceUsage]:
        """Waits for the end of a request; returns its bill."""
        assert answer.task is not None
        await asyncio.wait([answer.task], timeout=HANG_S)
        assert answer.task.done(), f"{answer.prompt.name} hangs"
        if not answer.task.cancelled():
            answer.task.result()
        await eventually(lambda: answer.request_id in self.ports.settled, "the bill")
        return self.ports.settled[answer.request_id]

    async def assert_complete(self, answer: Answer) -> list[ChoiceUsage]:
        """Waits for the reference's tokens, and checks the bill for them."""
        usages, prompt = await self.finished(answer), answer.prompt
        assert answer.error is None, f"{prompt.name}: {answer.error}"
        for choice, tokens in enumerate(prompt.expected):
            assert tuple(answer.tokens[choice]) == tokens, f"choice {choice} of {prompt.name}"
            if prompt.sampling.top_logprobs is not None:
                differences = [
                    abs(a - b) for a, b in zip(answer.logprobs[choice], prompt.logprobs[choice], strict=True)
                ]
                assert max(differences) < 1e-3, f"logprobs of choice {choice} of {prompt.name}"
        differences = [abs(a - b) for a, b in zip(answer.prompt_logprobs, prompt.prompt_logprobs, strict=True)]
        assert max(differences, default=0) < 1e-3, f"logprobs of the prompt of {prompt.name}"
        assert [usage.num_prompt_tokens for usage in usages] == [len(prompt.tokens)] * prompt.num_choices
        assert [usage.num_output_tokens for usage in usages] == [len(tokens) for tokens in prompt.expected]
        assert tuple(usage.cause for usage in usages) == prompt.causes
        return usages

    async def assert_nothing_is_held(self) -> None:
        """No worker has anything of any attempt, and the gateway has reserved nothing."""
        for worker in self.workers:
            await assert_worker_is_empty(worker)
        await eventually(lambda: not self.ports.reserved, "the release of all reservations")


async def assert_worker_is_empty(worker: RunningWorker) -> None:
    """Waits until a worker holds no attempt, page, hidden state, buffer, recalled prompt, receiver or KV budget."""
    role = worker.worker.role(PREFILL)
    assert isinstance(role, PrefillRole)
    recalled = role._recalled
    await eventually(lambda: not (recalled._timers or recalled._leaving), "the end of recalled prompts")
    await eventually(lambda: not role._receivers, "the end of all imports")
    await eventually(lambda: not role._measured, "the end of all measured attempts")
    await eventually(lambda: not (role._budget.num_granted or role._budget._waiting), "the return of the KV budget")
    if worker.worker.slot.state != FREE:
        await worker.assert_idle()
        instance = worker.worker.engine.relay_instance
        assert instance is not None
        assert not instance.groups()
        assert not instance.model.hidden_states._tensors
    else:
        await eventually(lambda: not any(len(role.attempts) for role in worker.worker.roles), "the end of all attempts")
        await eventually(lambda: not worker.worker.buffers, "the release of all KV buffers")


def instance_of(worker: RunningWorker) -> Instance:
    instance = worker.worker.engine.relay_instance
    assert instance is not None
    return instance


@asynccontextmanager
async def running_cluster(
    folder: Path, model: Model, nats_url: str, monkeypatch: Any, **settings: Any
) -> AsyncIterator[MoveCluster]:
    """The source has begun to load and has no layer. ``settings``: of all workers."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_store(folder))
        version = model_version(await publish(store, model.folder))
        await store.relay(version.pack_id, REMOTE)
        workers = []
        for block_tokens in (32, 20, 48):  # of the KV that each worker hands over
            changes = {"kv_block_tokens": block_tokens, "start_timeout_s": 0.3, "kv_timeout_s": 5.0, **settings}
            workers.append(await stack.enter_async_context(running_test_worker(nats_url, store, **changes)))
        gate = GatedStore(workers[0].worker._store)
        workers[0].worker._store = gate  # type: ignore[assignment]
        published = published_model(MODEL, file_digests={"tokenizer.json": version.tokenizer_digest}, context=512)
        source, next_worker, decode = workers
        decoder = load_decoder((model.folder / "tokenizer.json").read_bytes())
        ports = InMemoryPorts([published])
        cluster = MoveCluster(model, version, source, next_worker, decode, gate, ports, stack, decoder)
        route = RunStream._route

        def noted(stream: RunStream, step: pb.StepOutput) -> None:
            told = pb.StepOutput(beat=step.beat if step.HasField("beat") else None)
            told.outputs.extend(output for output in step.outputs if cluster.note(output))
            route(stream, told)

        monkeypatch.setattr(RunStream, "_route", noted)
        for worker in workers[1:]:
            await cluster.reload(worker)
        await cluster.start_gateway()
        await cluster.start_source()
        yield cluster
        cluster.gate.open_segments(cluster.num_segments)
