"""Prompts move between real workers, with a real gateway and bills, whatever fails at any moment of a move."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from tests.integration.move_cluster import (
    CLOSED_ADDRESS,
    Answer,
    MoveCluster,
    Prompt,
    instance_of,
    prompt_source,
    running_cluster,
)
from tests.integration.roles_testbed import DECODE, RunningWorker, paused
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model, prompt_of
from tests.unit.transfer.loopback_holders import BlindSink
from torchrelay.common.errors import DeadlineExceeded
from torchrelay.common.ids import new_id
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.tokens.prefix_hashes import PAGE_TOKENS
from torchrelay.control.v1 import decode_pb2, prefill_pb2, types_pb2
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1.prefill_pb2_grpc import PrefillStub
from torchrelay.decode.role import DecodeRole
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kv.export import PrefillExport
from torchrelay.engine.kv.kv_import import KvImport
from torchrelay.engine.kv.prefill_import import PrefillImport
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.gateway.inference.execution.worker_streams import RunStream
from torchrelay.prefill import prompt_moves
from torchrelay.prefill import role as prefill_role
from torchrelay.prefill.kv_sender import KvSendBuffer
from torchrelay.prefill.prompt_moves import PromptReceiver
from torchrelay.transfer.errors import TicketRefused
from torchrelay.transfer.fetch.follow import Receiver, SourceAddress, fetch_head, follow
from torchrelay.worker.attempts.attempt import Attempt
from torchrelay.worker.slot.slot import FREE, LOADING, READY

GREEDY = SamplingParams(temperature=0, max_tokens=6)
SAMPLED = SamplingParams(temperature=1.3, seed=5, max_tokens=6)
SHARED = prompt_of(64, 3)  # the beginning of several prompts
SHORT_S = 0.3  # the limits of a move that fails


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of a move ends on a busy machine; a prompt is copied in several pieces."""
    monkeypatch.setattr(prompt_moves, "_KEPT_S", HANG_S)
    monkeypatch.setattr(prompt_moves, "_STALL_S", HANG_S)
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(prefill_role, "OFFER_S", HANG_S)
    monkeypatch.setattr(prefill_role, "RECALL_DELAY_S", 0.1)


@pytest.fixture
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MoveCluster]:
    settings = getattr(request, "param", {})
    async with running_cluster(tmp_path, model, nats_url, monkeypatch, **settings) as cluster:
        yield cluster


async def prompts_of(cluster: MoveCluster) -> list[Prompt]:
    """Prompts of all kinds, with their answers."""
    prompts = [
        Prompt("short", prompt_of(3), GREEDY),
        Prompt("long", prompt_of(120, 1), GREEDY),
        Prompt("page", prompt_of(PAGE_TOKENS * 2, 2), GREEDY),
        Prompt("shared prefix", (*SHARED, *prompt_of(9, 4)), GREEDY),
        Prompt("shared prefix, sampled", (*SHARED, *prompt_of(20, 5)), SAMPLED),
        Prompt("sampled", prompt_of(40, 6), SAMPLED),
        Prompt("penalties", prompt_of(33, 7), replace(SAMPLED, frequency_penalty=0.7, repetition_penalty=1.2)),
        Prompt("nucleus", prompt_of(50, 8), replace(SAMPLED, top_p=0.8, top_k=40, min_p=0.01)),
        Prompt("logprobs", prompt_of(30, 9), replace(GREEDY, top_logprobs=2)),
        Prompt("two choices", prompt_of(45, 10), SAMPLED, num_choices=2),
        Prompt("three choices with logprobs", prompt_of(21, 11), replace(SAMPLED, top_logprobs=1), num_choices=3),
        Prompt("logprobs of the prompt", prompt_of(70, 13), replace(SAMPLED, prompt_logprobs=1), num_choices=2),
        Prompt("one token", prompt_of(60, 12), replace(GREEDY, max_tokens=1)),
    ]
    prompts = [await cluster.with_reference(prompt) for prompt in prompts]
    by_name = {prompt.name: prompt for prompt in prompts}
    long, choices = by_name["long"], by_name["two choices"]
    first, third = long.expected[0][0], choices.expected[0][2]
    tokenizer = Tokenizer.from_file(str(cluster.model.folder / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in choices.expected[1]]
    letter = next(text for text in texts if len(text) == 1 and text.isprintable())
    stopped = [
        replace(long, name="stop on the first token", sampling=replace(GREEDY, stop_token_ids=frozenset({first}))),
        replace(choices, name="stop token", sampling=replace(SAMPLED, stop_token_ids=frozenset({third}))),
        replace(choices, name="stop string", stop_strings=(letter,)),
    ]
    return [*prompts, *[await cluster.with_reference(prompt) for prompt in stopped]]


class Hold:
    """Holds a move at its moment, an export in the middle or a step of the import, until the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cluster: MoveCluster) -> None:
        self.reached, self._released, self._engine_released = asyncio.Event(), asyncio.Event(), threading.Event()
        self._moment, self.breaks_writes = "", False
        loop, publish_piece, write = asyncio.get_running_loop(), prompt_moves._publish_piece, PrefillImport.write

        def publish(exported: PrefillExport, piece: range, buffer: KvSendBuffer) -> None:
            assert cluster.role(cluster.source).keeps_prompt(exported.spec.group_id), "a late recall would end it"
            if piece.start and self._moment == "exporting":
                loop.call_soon_threadsafe(self.reached.set)
                self._engine_released.wait(HANG_S)
            publish_piece(exported, piece, buffer)

        def write_unless_broken(prompt_import: PrefillImport, index: int, data: memoryview) -> None:
            if self.breaks_writes:
                raise RuntimeError("out of memory")
            write(prompt_import, index, data)

        monkeypatch.setattr(prompt_moves, "_publish_piece", publish)
        monkeypatch.setattr(PrefillImport, "write", write_unless_broken)
        for moment, name in (("receiving", "receive"), ("starting", "start")):
            self._hold_calls(monkeypatch, moment, name)

    def _hold_calls(self, monkeypatch: pytest.MonkeyPatch, moment: str, name: str) -> None:
        original = getattr(PromptReceiver, name)

        async def held(*args: Any) -> Any:
            if self._moment == moment:
                self.reached.set()
                await self._released.wait()
            return await original(*args)

        monkeypatch.setattr(PromptReceiver, name, held)

    def at(self, moment: str) -> None:
        self._moment = moment
        for event in (self.reached, self._released, self._engine_released):
            event.clear()

    def release(self) -> None:
        self._moment = ""
        self._released.set()
        self._engine_released.set()


HELD = ("exporting", "receiving", "starting")
MOMENTS = ("begun", "queued", *HELD, "handed over")
FAULTS = (
    *("nothing", "end the load", "fail the load", "lose the source", "lose the source's host", "lose the next worker"),
    *("lose the decode worker", "break a stream", "break the import", "cancel"),
    *("recall again", "repeat the recall", "recall without the prompt", "send more"),
)
HANGS = ("hang the source", "hang the next worker", "hang the decode worker")
HARMLESS = {"nothing", "repeat the recall", "send more"}
# Once the prompt has left its source.
HARMLESS_LATER = {*HARMLESS, "end the load", "fail the load", "lose the source", "lose the source's host"}


class History:
    """A move of a prompt, with faults at one of its moments. ``number`` varies the rest."""

    def __init__(
        self, cluster: MoveCluster, hold: Hold, prompts: list[Prompt], number: int, moment: str, faults: tuple[str, ...]
    ) -> None:
        self.cluster, self.hold, self.moment, self.faults = cluster, hold, moment, faults
        self.random = random.Random(number)
        self.prompts = prompts
        self.prompt = prompts[number % len(prompts)]
        may_be_at_first_layer = moment not in ("exporting", "starting") and faults != ("nothing",)
        self.boundary = number % 4 if may_be_at_first_layer else 1 + number % 3
        self.is_apart = bool(number // 2 % 2) or moment == "handed over"
        self.tenant_id = new_id("ten")  # its cached prefixes are its own
        self.answers: list[Answer] = []
        self.cancelled: set[Answer] = set()
        self.has_deadline: set[Answer] = set()
        self.resume: dict[RunningWorker, Callable[[], None]] = {}
        self.return_pages: Callable[[], Awaitable[object]] | None = None

    @property
    def is_harmless(self) -> bool:
        return {*self.faults} <= (HARMLESS_LATER if self.moment in ("starting", "handed over") else HARMLESS)

    async def run(self) -> None:
        cluster = self.cluster
        await cluster.start_source()
        cluster.scheduler.decode_of = lambda prefill: cluster.decode if self.is_apart else prefill
        cluster.scheduler.wait_ms = lambda: self.random.choice((0, 0, 3))
        cluster.scheduler.source_address = ""
        with ExitStack() as stack:
            stack.callback(self.let_all_go_on)
            if self.moment == "queued":
                await self.take_pages()
            if self.moment == "handed over":
                self.hang(cluster.decode)
            self.hold.at(self.moment)
            main = self.send(self.prompt)
            if self.random.random() < 0.4:
                self.send(self.random.choice(self.prompts))
            cluster.let_layers(self.boundary)
            expected = [self.boundary] * len(self.answers)
            await eventually(lambda: cluster.boundaries == expected, "the prompts at their boundary")
            if self.moment != "begun":
                await cluster.scheduler.recall_prompt(main.request_id)
                await self.until_moment(main)
            for fault in self.faults:
                await self.inject(fault, main)
            if self.moment == "begun":
                await cluster.scheduler.recall_prompt(main.request_id)
            await self.end(main)

    async def until_moment(self, main: Answer) -> None:
        task = main.task
        assert task is not None

        def has_gone_on() -> bool:
            return any(main.tokens.values()) or task.done()

        if self.moment == "queued":
            await eventually(instance_of(self.cluster.next).groups, "the prompt at the next worker")
        elif self.moment == "handed over":
            await eventually(has_gone_on, "the first token")
        else:
            # On a busy machine the short limits of a move that fails may end it before its moment.
            await eventually(lambda: self.hold.reached.is_set() or has_gone_on(), "the moment")
            if self.moment == "exporting" and self.faults == ("cancel",):  # without a stream, the limit ends the export
                receivers = self.cluster.role(self.cluster.next)._receivers
                await eventually(lambda: any(map(has_begun, receivers.values())), "the stream of the prompt")

    def send(self, prompt: Prompt, deadline_s: float = 0.0) -> Answer:
        answer = self.cluster.send(prompt, tenant_id=self.tenant_id, deadline_s=deadline_s)
        self.answers.append(answer)
        if deadline_s:
            self.has_deadline.add(answer)
        return answer

    async def take_pages(self) -> None:
        """Takes all free pages of the next worker."""
        worker, instance = self.cluster.next.worker, instance_of(self.cluster.next)
        allocator = instance._tables.allocator
        pages = await worker.engine.call(lambda: allocator.take(allocator.num_free))

        async def give_back() -> None:
            self.return_pages = None
            if worker.engine.relay_instance is instance:
                await worker.engine.call(lambda: allocator.release(pages))
                worker.engine.wake()
                worker.pages_freed()

        self.return_pages = give_back

    def hang(self, worker: RunningWorker) -> None:
        if worker not in self.resume:
            may_go_on = threading.Event()
            worker.worker.engine.post(lambda: may_go_on.wait(HANG_S))
            self.resume[worker] = may_go_on.set

    def let_go_on(self, *workers: RunningWorker) -> None:
        for worker in workers:
            self.resume.pop(worker, lambda: None)()

    def let_all_go_on(self) -> None:
        self.hold.release()
        self.hold.breaks_writes = False
        self.cluster.on_output = lambda output: True
        self.let_go_on(*self.cluster.workers)

    async def inject(self, fault: str, main: Answer) -> None:
        cluster, scheduler, slot = self.cluster, self.cluster.scheduler, self.cluster.source.worker.slot
        match fault:
            case "end the load":
                cluster.gate.open_segments(cluster.num_segments)
                await eventually(lambda: slot.state != LOADING, "the end of the load")
                if self.moment == "queued":
                    await eventually(lambda: not cluster.boundaries, "the end of the prompt, with what is kept of it")
            case "fail the load":
                cluster.gate.fail("the holder was lost")
            case "lose the source" | "lose the source's host":
                scheduler.source_address = CLOSED_ADDRESS if "host" in fault else ""
                if slot.state != FREE:
                    await cluster.source.unload()
            case "lose the next worker" | "lose the decode worker":
                worker = cluster.next if "next" in fault else cluster.decode
                self.let_go_on(worker)
                if worker is cluster.next and self.return_pages is not None:
                    await self.return_pages()
                await cluster.reload(worker)
            case "hang the source" | "hang the next worker" | "hang the decode worker":
                self.hang(cluster.workers[HANGS.index(fault)])
            case "break a stream":
                cluster.on_output = self.breaking()
            case "break the import":
                self.hold.breaks_writes = True
            case "cancel":
                assert main.task is not None
                if not main.task.done():
                    main.task.cancel()
                    self.cancelled.add(main)
                if self.moment == "queued" and len(self.faults) == 1:
                    await eventually(lambda: not instance_of(cluster.next).groups(), "the end of the prompt")
                    assert self.boundary in cluster.boundaries, "the source was not asked for it"
            case "recall again":
                await scheduler.recall_prompt(main.request_id)
            case "repeat the recall":  # as a new scheduler may
                key = pb.CancelAttempt(key=scheduler.placed[main.request_id][0]).key
                key.attempt = 1
                if self.moment != "begun":
                    await scheduler.recall(key, True)
            case "recall without the prompt":
                await scheduler.recall_prompt(main.request_id, keeps_prompt=False)
            case "send more":
                for deadline_s in (0.0, 0.05):
                    self.send(self.random.choice(self.prompts), deadline_s)
                await asyncio.sleep(0)  # so that the gateway has begun them

    def breaking(self) -> Callable[[pb.ChoiceOutput], bool]:
        """Breaks the stream that brings the next token of a later attempt, which is billed once nevertheless."""
        broken: list[int] = []

        def arrives(output: pb.ChoiceOutput) -> bool:
            if output.key.attempt > 1 and output.token_ids and not broken:
                broken.extend(output.token_ids)
                raise TimeoutError("the stream broke")
            return True

        return arrives

    async def end(self, main: Answer) -> None:
        """Lets everything go on, and checks what came of it."""
        cluster, slot = self.cluster, self.cluster.source.worker.slot
        self.hold.release()
        if self.faults == ("hang the next worker",):
            recalled = cluster.role(cluster.source)._recalled
            await eventually(lambda: not (recalled._timers or recalled._leaving), "the end of the prompt at the source")
            self.let_go_on(cluster.next)
        if self.return_pages is not None:
            await self.return_pages()
        self.let_go_on(cluster.decode)
        if self.is_harmless or self.faults == ("hang the source",):
            await cluster.finished(main)  # at a source that waits for more layers, or hangs
        self.let_go_on(cluster.source)
        cluster.gate.open_segments(cluster.num_segments)
        await eventually(lambda: slot.state in (FREE, READY), "the end of the load")
        for answer in self.answers:
            await self.check(answer)
        await cluster.assert_nothing_is_held()

    def check_import(self, main: Answer) -> bool:
        """Whether the prompt moved once, as it does unless a machine is too busy for the time limits of offers."""
        if not self.is_harmless or self.cluster.scheduler.placed[main.request_id][0].attempt > 2:
            return False
        details = [detail.split(" computed")[0] for detail in main.imports]
        layers = f"{self.boundary} layer{'s' * (self.boundary > 1)}"
        assert details == ([layers] if self.boundary else []), (details, layers)
        assert main.attempts_with_tokens == {2}, "the first attempt has ended in silence"
        return True

    async def check(self, answer: Answer) -> None:
        usages = await self.cluster.finished(answer)
        self.check_cached(answer, usages)
        if answer not in self.cancelled | self.has_deadline or answer.is_complete:
            await self.cluster.assert_complete(answer)
            return
        assert answer.error is None or (isinstance(answer.error, DeadlineExceeded) and answer in self.has_deadline)
        prompt = answer.prompt
        num_billed = [usage.num_output_tokens for usage in usages]
        for choice, expected in enumerate(prompt.expected):
            tokens = tuple(answer.tokens[choice])
            assert tokens == expected[: len(tokens)]
            assert len(tokens) <= num_billed[choice] <= len(expected)
        computed = {len(prompt.tokens)} if any(num_billed) else {0, *answer.progress}
        for usage in usages:
            assert usage.num_prompt_tokens in computed and usage.num_prompt_tokens <= len(prompt.tokens)
            assert usage.cause in {FinishCause.CANCELLED, FinishCause.ERROR, *prompt.causes}

    def check_cached(self, answer: Answer, usages: list[ChoiceUsage]) -> None:
        """A prompt has cached tokens only of prompts of its tenant, also of its own earlier attempt; whole pages."""
        prompt, placed = answer.prompt.tokens, self.cluster.scheduler.placed.get(answer.request_id)
        was_placed_again = placed is not None and placed[0].attempt > 1
        others = [each.prompt.tokens for each in self.answers if each is not answer or was_placed_again]
        at_most = max((common(prompt, other) for other in others), default=0)
        for usage in usages:
            num_cached = usage.num_cached_prompt_tokens
            assert num_cached % PAGE_TOKENS == 0 and num_cached <= min(at_most, len(prompt) - 1)


def has_begun(receiver: PromptReceiver) -> bool:
    """Whether chunks arrive."""
    return receiver._kv_receiver is not None and receiver._kv_receiver.num_bytes > 0


def common(prompt: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the common prefix."""
    same = (a == b for a, b in zip(prompt, other, strict=False))
    return next((place for place, is_same in enumerate(same) if not is_same), min(len(prompt), len(other)))


@pytest.mark.parametrize("moment", MOMENTS)
async def test_answer_and_bill_are_right_whatever_fails_during_a_move(
    cluster: MoveCluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Every fault is injected by itself or beside another one; a hang by itself."""
    rng = random.Random(moment)
    first, second = (rng.sample(FAULTS, len(FAULTS)) for _ in range(2))
    scripts: list[tuple[str, ...]] = [("nothing",), ("cancel",), *((fault,) for fault in HANGS)]
    scripts += [(a, b) for a, b in zip(first[::2], first[1::2], strict=True)]
    scripts += [(fault,) for fault in second[:3]]
    num_moved = 0
    hold, prompts = Hold(monkeypatch, cluster), await prompts_of(cluster)
    for number, faults in enumerate(scripts, MOMENTS.index(moment)):
        history = History(cluster, hold, prompts, number, moment, faults)
        with monkeypatch.context() as patched:
            if not history.is_harmless and faults != ("cancel",):
                patched.setattr(prompt_moves, "_KEPT_S", SHORT_S)
                patched.setattr(prompt_moves, "_STALL_S", SHORT_S)
                patched.setattr(prefill_role, "OFFER_S", SHORT_S)
            try:
                async with asyncio.timeout(2 * HANG_S):
                    await history.run()
                    num_moved += history.check_import(history.answers[0])
            except BaseException as error:
                error.add_note(f"{moment}, {faults}, {history.prompt.name}, boundary {history.boundary}")
                raise
    assert num_moved > 0


async def begun(cluster: MoveCluster, prompt: Prompt, boundary: int = 2) -> Answer:
    """Sends a prompt to a source that has loaded nothing, and lets it compute the first layers."""
    cluster.let_layers(boundary)
    answer = cluster.send(prompt)
    await eventually(lambda: cluster.boundaries == [boundary], "the prompt at its boundary")
    return answer


async def recalled(cluster: MoveCluster, prompt: Prompt, boundary: int = 2) -> Answer:
    answer = await begun(cluster, prompt, boundary)
    await cluster.scheduler.recall_prompt(answer.request_id)
    return answer


async def assert_ends_well(cluster: MoveCluster, answer: Answer, num_imports: int) -> list[ChoiceUsage]:
    """Checks that the answer is complete and billed once, and that no worker holds anything once all have loaded."""
    usages = await cluster.assert_complete(answer)
    assert len(answer.imports) == num_imports
    cluster.gate.open_segments(cluster.num_segments)
    await cluster.source.until_ready()
    await cluster.assert_nothing_is_held()
    return usages


PROMPT = Prompt("greedy", prompt_of(70), GREEDY)


async def test_import_that_waits_for_pages_gets_the_layers_that_arrive_meanwhile(cluster: MoveCluster) -> None:
    prompt = await cluster.with_reference(PROMPT)
    allocator, engine = instance_of(cluster.next)._tables.allocator, cluster.next.worker.engine
    pages = await engine.call(lambda: allocator.take(allocator.num_free))
    answer = await recalled(cluster, prompt, 1)
    await eventually(instance_of(cluster.next).groups, "the prompt at the next worker")
    cluster.let_layers(2)
    await eventually(lambda: cluster.boundaries == [2], "the next layer")
    await engine.call(lambda: allocator.release(pages))
    engine.wake()
    await assert_ends_well(cluster, answer, num_imports=1)
    assert answer.imports[0].startswith("2 layers")


@pytest.mark.parametrize("cluster", [{"kv_timeout_s": 0.5}], indirect=True, ids=["short timeout"])
async def test_decode_worker_has_no_pages_for_a_moved_prompt(cluster: MoveCluster) -> None:
    """The prompt is tried again, until the decode worker has pages."""
    prompt = await cluster.with_reference(PROMPT)
    decode, allocator = cluster.decode.worker, instance_of(cluster.decode)._tables.allocator
    pages = await decode.engine.call(lambda: allocator.take(allocator.num_free))
    answer = await recalled(cluster, prompt)
    await eventually(lambda: cluster.scheduler.placed[answer.request_id][0].attempt > 2, "another attempt")
    await decode.engine.call(lambda: allocator.release(pages))
    decode.engine.wake()
    decode.pages_freed()
    await assert_ends_well(cluster, answer, len(answer.imports))


async def test_prompt_moves_to_a_worker_that_has_its_prefix(cluster: MoveCluster) -> None:
    """The pages that the worker has in its cache are billed as cached, as of any prompt."""
    first = Prompt("first", (*SHARED, *prompt_of(9, 4)), GREEDY)
    second = Prompt("second", (*SHARED, *prompt_of(20, 5)), GREEDY)
    second = await cluster.with_reference(second)
    cluster.scheduler.begins_at_next = True
    await cluster.finished(cluster.send(first))
    cluster.scheduler.begins_at_next = False
    [usage] = await assert_ends_well(cluster, await recalled(cluster, second), num_imports=1)
    assert usage.num_cached_prompt_tokens == len(SHARED)


async def test_prompt_leaves_for_the_receiver_of_its_ticket_alone(cluster: MoveCluster) -> None:
    """A forged request disturbs nothing. A request with the ticket need not wait for the gateway's recall. No other
    worker than the receiver can read the bytes.
    """
    prompt = await cluster.with_reference(PROMPT)
    answer = await begun(cluster, prompt)
    key, source = cluster.scheduler.placed[answer.request_id]
    role, receiver, other = cluster.role(source), cluster.next.worker.receiver, cluster.decode.worker.receiver
    async with open_channel(source.address, token=source.token) as channel:

        async def offered(**changes: Any) -> decode_pb2.KvOffer:
            origin = prompt_source(key, source, **{"receiver_id": receiver.id, **changes})
            return await PrefillStub(channel).OfferPrompt(prefill_pb2.PromptRequest(key=key, ticket=origin.ticket))

        for forged in ({"buffer_id": "other/1/prompt"}, {"holder_id": "other"}, {"expires_unix_ms": 1}):
            with pytest.raises(grpc.aio.AioRpcError, match="ticket"):
                await offered(**forged)
            assert role.attempts and cluster.boundaries == [2]
        offer = await offered()
    assert offer.boundary == 2
    assert not role.attempts
    buffer = source.worker.buffers[offer.source.ticket.buffer_id]
    address = SourceAddress(offer.source.holder_id, offer.source.data_address, offer.source.ticket)
    for thief in (other, Receiver(receiver.id, other.node_key)):
        with pytest.raises(TicketRefused):
            await asyncio.to_thread(fetch_head, address, thief)
    sizes = [len(buffer.chunk(index)) for index in range(buffer.num_chunks)]
    sink = BlindSink(0, 0)
    sink.chunks = [bytearray(size) for size in sizes]
    chunks = follow(buffer.buffer_id, range(len(sizes)), [address], sink, receiver)
    assert sorted(await asyncio.to_thread(list, chunks)) == list(range(len(sizes)))
    await eventually(lambda: not cluster.boundaries, "the end of the prompt in the engine's thread")
    await cluster.scheduler.recall_prompt(answer.request_id)
    await assert_ends_well(cluster, answer, num_imports=0)


async def test_decode_worker_that_hears_of_the_recall_first_does_not_end_the_prompt(
    cluster: MoveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_role, "RECALL_DELAY_S", HANG_S)
    prompt = await cluster.with_reference(PROMPT)
    held: list[Callable[[], None]] = []
    decode, recall = cluster.decode.worker.role(DECODE), RunStream.recall
    assert isinstance(decode, DecodeRole)
    reserve_pages = decode._reserve_pages
    is_reserving, is_refused = asyncio.Event(), asyncio.Event()

    async def noted(attempt: Attempt, offer: decode_pb2.KvOffer) -> KvImport:
        is_reserving.set()
        try:
            return await reserve_pages(attempt, offer)
        finally:
            is_refused.set()

    def hold(stream: RunStream, key: types_pb2.AttemptKey) -> None:
        if stream._role == "prefill":
            held.append(partial(recall, stream, key))
        else:
            recall(stream, key)

    monkeypatch.setattr(decode, "_reserve_pages", noted)
    monkeypatch.setattr(RunStream, "recall", hold)
    with paused(cluster.decode) as let_go_on:
        answer = await begun(cluster, prompt)
        await is_reserving.wait()
        await cluster.scheduler.recall_prompt(answer.request_id)
        first = f"{answer.request_id}/1"
        await eventually(lambda: held and first not in decode.attempts, "the end at the decode worker")
        assert not is_refused.is_set()
        let_go_on()
        await is_refused.wait()
    held[0]()
    await assert_ends_well(cluster, answer, num_imports=1)


async def test_prompt_that_cannot_be_computed_fails_alone(
    cluster: MoveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PrefillImport, "write", fail)
    monkeypatch.setattr(PrefillImport, "start_over", fail)
    prompt = await cluster.with_reference(PROMPT)
    long = await cluster.with_reference(Prompt("other", prompt_of(33), replace(GREEDY, max_tokens=150)))
    cluster.scheduler.decode_of = lambda prefill: prefill
    cluster.scheduler.begins_at_next = True
    other = cluster.send(long)
    await eventually(lambda: other.tokens[0], "a token beside the import")
    cluster.scheduler.begins_at_next = False
    answer = await recalled(cluster, prompt)
    await cluster.finished(answer)
    assert answer.error is not None and not answer.tokens
    await assert_ends_well(cluster, other, num_imports=0)
