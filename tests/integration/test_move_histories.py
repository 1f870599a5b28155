"""In 200 random histories of prompts that move, every answer and every bill is right, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.integration.move_cluster import (
    CLOSED_ADDRESS,
    Answer,
    MoveCluster,
    Prompt,
    running_cluster,
)
from tests.integration.roles_testbed import RunningWorker
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model, prompt_of
from torchrelay.common.errors import DeadlineExceeded
from torchrelay.common.ids import new_id
from torchrelay.common.tokens.prefix_hashes import PAGE_TOKENS
from torchrelay.engine.core import SamplingParams
from torchrelay.gateway.core import ChoiceUsage, FinishCause
from torchrelay.prefill import prompt_moves
from torchrelay.prefill import role as prefill_role
from torchrelay.worker.slot.slot import FREE, LOADING, READY

NUM_HISTORIES = 200
NUM_IMPORTS = 10
SEED = 0
SHARED = prompt_of(64, 3)  # the beginning of several prompts


def prompts_of(model: Model) -> list[Prompt]:
    """Prompts of all kinds, with their answers by a single instance."""
    greedy = SamplingParams(temperature=0, max_tokens=6)
    sampled = SamplingParams(temperature=1.3, seed=5, max_tokens=6)
    prompts = [
        Prompt("short", prompt_of(3), greedy),
        Prompt("long", prompt_of(120, 1), greedy),
        Prompt("page", prompt_of(PAGE_TOKENS * 2, 2), greedy),
        Prompt("shared prefix", (*SHARED, *prompt_of(9, 4)), greedy),
        Prompt("shared prefix, sampled", (*SHARED, *prompt_of(20, 5)), sampled),
        Prompt("sampled", prompt_of(40, 6), sampled),
        Prompt("penalties", prompt_of(33, 7), replace(sampled, frequency_penalty=0.7, repetition_penalty=1.2)),
        Prompt("nucleus", prompt_of(50, 8), replace(sampled, top_p=0.8, top_k=40, min_p=0.01)),
        Prompt("logprobs", prompt_of(30, 9), replace(greedy, top_logprobs=2)),
        Prompt("two choices", prompt_of(45, 10), sampled, num_choices=2),
        Prompt("three choices with logprobs", prompt_of(21, 11), replace(sampled, top_logprobs=1), num_choices=3),
        Prompt("one token", prompt_of(60, 12), replace(greedy, max_tokens=1)),
    ]
    prompts = [prompt.with_reference(model) for prompt in prompts]
    by_name = {prompt.name: prompt for prompt in prompts}
    long, choices = by_name["long"], by_name["two choices"]
    first, third = long.expected[0][0], choices.expected[0][2]
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in choices.expected[1]]
    letter = next(text for text in texts if len(text) == 1 and text.isprintable())
    stopped = [
        replace(long, name="stop on the first token", sampling=replace(greedy, stop_token_ids=frozenset({first}))),
        replace(choices, name="stop token", sampling=replace(sampled, stop_token_ids=frozenset({third}))),
        replace(choices, name="stop string", stop_strings=(letter,)),
    ]
    return [*prompts, *(prompt.with_reference(model) for prompt in stopped)]


class History:
    """A random history, step by step. ``steps`` has what it did."""

    def __init__(self, cluster: MoveCluster, prompts: list[Prompt], seed: int) -> None:
        self.cluster, self.prompts = cluster, prompts
        self.random = random.Random(seed)
        self.steps: list[str] = []
        self.answers: list[Answer] = []
        self.cancelled: set[Answer] = set()
        self.has_deadline: set[Answer] = set()
        self.tenant_id = new_id("ten")  # its cached prefixes are its own
        self.gates: list[threading.Event] = []
        self.taken: list[Callable[[], Awaitable[object]]] = []
        self.num_losses = 0

    async def run(self) -> None:
        cluster, rng = self.cluster, self.random
        await cluster.start_source()
        places = [lambda prefill: cluster.decode, lambda prefill: prefill, lambda prefill: cluster.next]
        cluster.scheduler.decode_of = rng.choice(places)
        cluster.scheduler.wait_ms = lambda: rng.choice((0, 0, 3))
        cluster.scheduler.begins_at_next = lambda: rng.random() < 0.1
        cluster.scheduler.source_address = ""
        kinds: list[Callable[[], Awaitable[None]]] = [
            *([self.send] * 3),
            self.open_segments,
            *([self.recall] * 5),
            *([self.advance] * 3),
            *([self.settle] * 2),
            self.cancel,
            self.hang,
            self.go_on,
            self.take_pages,
            self.return_pages,
            *((self.lose, self.fail_load) if rng.random() < 0.4 else ()),
        ]
        try:
            await self.open_segments()
            for _ in range(rng.randint(1, 2)):
                await self.send()
            await self.open_segments()
            if rng.random() < 0.7:
                await self.settle()
                await self.recall()
            for _ in range(rng.randint(4, 12)):
                await rng.choice(kinds)()
            await self.end()
        finally:
            for gate in self.gates:
                gate.set()

    def note(self, step: str) -> None:
        self.steps.append(step)

    async def send(self) -> None:
        if len(self.answers) == 4:
            return
        prompt = self.random.choice(self.prompts)
        deadline_s = self.random.choice((0.02, 0.1)) if self.random.random() < 0.1 else 0.0
        self.note(f"send {len(self.answers)}: {prompt.name}" + f", deadline {deadline_s} s" * bool(deadline_s))
        answer = self.cluster.send(prompt, tenant_id=self.tenant_id, deadline_s=deadline_s)
        self.answers.append(answer)
        await asyncio.sleep(0)  # so that the gateway has begun it
        if deadline_s:
            self.has_deadline.add(answer)

    async def open_segments(self) -> None:
        num_open = self.cluster.gate.num_open + self.random.choice((1, 1, 1, 1, 2))
        self.note(f"open {num_open} segments")
        self.cluster.gate.open_segments(num_open)

    async def recall(self) -> None:
        begun = self.begun()
        number = self.random.choice(begun if begun and self.random.random() < 0.8 else range(len(self.answers)))
        keeps = self.random.random() < 0.9
        is_placed = await self.cluster.scheduler.recall_prompt(self.answers[number].request_id, keeps)
        self.note(f"recall {number}" + ", not kept" * (not keeps) + ", not placed" * (not is_placed))

    def begun(self) -> list[int]:
        """The answers whose prompts are between two layers at the source."""
        instance = self.cluster.source.worker.engine.relay_instance
        groups = () if instance is None else instance.groups()
        at_boundary = {group.spec.group_id.partition("/")[0] for group in groups if group.layer}
        return [number for number, answer in enumerate(self.answers) if answer.request_id in at_boundary]

    async def advance(self) -> None:
        pause_s = self.random.choice((0.0, 0.001, 0.01, 0.02))
        self.note(f"{pause_s} s")
        await asyncio.sleep(pause_s)

    async def settle(self) -> None:
        """Waits until the source has computed what it can with its layers, unless it hangs."""
        answers = self.answers
        self.note("settle")
        with suppress(AssertionError):
            await eventually(
                lambda: (
                    len(self.cluster.scheduler.placed.keys() & {each.request_id for each in answers}) == len(answers)
                ),
                limit_s=0.3,
            )
            await eventually(lambda: any(self.cluster.boundaries), limit_s=0.3)

    async def cancel(self) -> None:
        number = self.random.randrange(len(self.answers))
        answer = self.answers[number]
        if answer.task is not None and not answer.task.done():
            self.note(f"cancel {number}")
            self.cancelled.add(answer)
            answer.task.cancel()

    async def hang(self) -> None:
        number = self.random.randrange(3)
        self.note(f"hang {('source', 'next', 'decode')[number]}")
        gate = threading.Event()
        self.gates.append(gate)
        self.cluster.workers[number].worker.engine.post(lambda: gate.wait(HANG_S))

    async def go_on(self) -> None:
        if self.gates:
            self.note("go on")
            self.gates.pop().set()

    async def take_pages(self) -> None:
        """Takes most free pages of the next worker."""
        worker = self.cluster.next.worker
        if (instance := worker.engine.relay_instance) is None or self.gates or self.taken:
            return
        allocator = instance._tables.allocator
        pages = await worker.engine.call(lambda: allocator.take(max(allocator.num_free - self.random.randrange(6), 0)))
        self.note("take pages")

        async def give_back() -> None:
            if worker.engine.relay_instance is instance:
                await worker.engine.call(lambda: allocator.release(pages))
                worker.engine.wake()
                worker.pages_freed()

        self.taken.append(give_back)

    async def return_pages(self) -> None:
        while self.taken and not self.gates:
            self.note("return pages")
            await self.taken.pop()()

    async def lose(self) -> None:
        if self.num_losses == 2:
            return
        self.num_losses += 1
        number = self.random.randrange(3)
        worker: RunningWorker = self.cluster.workers[number]
        self.note(f"lose {('source', 'next', 'decode')[number]}")
        if worker is self.cluster.source:
            if self.random.random() < 0.5:
                self.cluster.scheduler.source_address = CLOSED_ADDRESS
            if worker.worker.slot.state != FREE:
                await worker.unload()
            return
        while self.gates:
            self.gates.pop().set()
        if worker is self.cluster.next:
            await self.return_pages()
        await self.cluster.reload(worker)

    async def fail_load(self) -> None:
        if self.cluster.source.worker.slot.state == LOADING:
            self.note("fail the load")
            self.cluster.gate.fail("the holder was lost")

    async def end(self) -> None:
        """Lets everything go on, and checks what came of it."""
        while self.gates:
            self.gates.pop().set()
        await self.return_pages()
        self.cluster.gate.open_segments(self.cluster.num_segments)
        slot = self.cluster.source.worker.slot
        await eventually(lambda: slot.state in (FREE, READY), "the end of the load")
        for answer in self.answers:
            await self.check(answer)
        await self.cluster.assert_nothing_is_held()

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
        computed = {0, *answer.progress}
        for usage in usages:
            if any(num_billed):
                assert usage.num_prompt_tokens == len(prompt.tokens)
            else:
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


def common(prompt: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the common prefix."""
    same = (a == b for a, b in zip(prompt, other, strict=False))
    return next((place for place, is_same in enumerate(same) if not is_same), min(len(prompt), len(other)))


async def test_random_histories_give_every_answer_and_bill_once(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``MOVE_HISTORY=seed`` runs a single history."""
    monkeypatch.setattr(prefill_role, "RECALL_DELAY_S", 0.1)
    monkeypatch.setattr(prompt_moves, "_MESSAGE_S", 0.5)
    monkeypatch.setattr(prompt_moves, "_KEPT_S", 1.0)
    monkeypatch.setattr(prompt_moves, "_PIECE_BYTES", 1 << 12)  # so that an export takes several steps
    seeds = [int(os.environ["MOVE_HISTORY"])] if "MOVE_HISTORY" in os.environ else range(SEED, SEED + 2 * NUM_HISTORIES)
    num_imports, num_steps = Counter[str](), Counter[str]()
    async with running_cluster(tmp_path, model, nats_url, monkeypatch) as cluster:
        prompts = prompts_of(model)
        for number, seed in enumerate(seeds):
            if number >= NUM_HISTORIES and num_imports.total() >= NUM_IMPORTS:
                break  # how many prompts are imported depends on the machine; a slow one needs more histories
            history = History(cluster, prompts, seed)
            try:
                async with asyncio.timeout(2 * HANG_S):
                    await history.run()
            except BaseException as error:
                error.add_note(f"history {seed} of {NUM_HISTORIES}: {'; '.join(history.steps)}")
                raise
            num_imports.update(detail.split()[0] for answer in history.answers for detail in answer.imports)
            num_steps.update(step.split()[0] for step in history.steps)
    if len(seeds) > 1:
        assert num_imports.total() >= NUM_IMPORTS
        assert min(num_steps[name] for name in ("lose", "fail", "hang", "cancel", "take")) > 9
