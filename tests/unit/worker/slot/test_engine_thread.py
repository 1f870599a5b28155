"""The engine's thread runs commands between steps, steps while there is work, rests, wakes, and reports faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest
import torch

from tests.support.calling_capturer import CallingCapturer
from tests.support.checkpoints import make_checkpoint
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Clock, Model, group_of, outputs, prompt_of
from torchrelay.common.errors import Conflict, Unavailable
from torchrelay.common.latency.latency_model import LatencyModel, StepCost, StepWork
from torchrelay.common.liveness import Liveness
from torchrelay.engine.core import EMPTY_STEP, GroupSpec, LoadFailed, SamplingParams, StepResult
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.backends import backends_for
from torchrelay.worker.slot.engine_thread import EngineThread

MAX_PENDING_WRITES = 32


class Steps:
    """A stand-in for an instance, with work for a number of steps."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.threads: set[int] = set()
        self.num_advances, self.is_recording = 0, False
        self.running_work = StepWork(num_decoding=1)

    def max_sleep_s(self) -> float | None:
        return 0.0 if self.count > 0 or self.error is not None else None

    def step(self) -> StepResult:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        self.count -= 1
        return EMPTY_STEP


class Outcome:
    """The steps and faults that the thread reported to the event loop."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.faults: list[Exception] = []
        self.engine = EngineThread(self.steps.append, self.faults.append, MAX_PENDING_WRITES)

    def install(self, steps: Steps) -> None:
        self.engine.instance = cast(Instance, cast(Any, steps))


@pytest.fixture
async def outcome() -> AsyncIterator[Outcome]:
    outcome = Outcome()
    outcome.engine.start()
    yield outcome
    await asyncio.to_thread(outcome.engine.close)


async def test_steps_run_on_engine_thread_while_there_is_work(outcome: Outcome) -> None:
    steps = Steps(5)
    await outcome.engine.call(lambda: outcome.install(steps))
    while steps.count:
        await outcome.engine.call(lambda: None)  # commands run between the steps
    await outcome.engine.call(lambda: None)
    await asyncio.to_thread(outcome.engine.close)
    await asyncio.sleep(0)
    assert len(outcome.steps) == 5 and not outcome.faults
    assert len(steps.threads) == 1 and threading.get_ident() not in steps.threads


@pytest.mark.parametrize("error", [LoadFailed("the disk is gone"), RuntimeError("a kernel broke")])
async def test_failing_step_gives_up_instance_and_reports(outcome: Outcome, error: Exception) -> None:
    await outcome.engine.call(lambda: outcome.install(Steps(0, error)))
    async with asyncio.timeout(HANG_S):
        while not outcome.faults:
            await outcome.engine.call(lambda: None)
    assert await outcome.engine.call(lambda: outcome.engine.instance) is None
    await asyncio.to_thread(outcome.engine.close)
    assert outcome.faults == [error]


async def test_busy_engine_blocks_writes_but_not_posts(outcome: Outcome) -> None:
    """A step that waits for layers must block the senders, but not the posting of a cancel."""
    busy, stop = threading.Event(), threading.Event()
    outcome.engine.post(busy.wait)
    begun: list[int] = []
    written: list[int] = []

    def receive() -> None:
        for index in range(MAX_PENDING_WRITES + 10):
            begun.append(index)
            outcome.engine.write(lambda index=index: written.append(index), stop)  # type: ignore[misc]

    receiving = asyncio.ensure_future(asyncio.to_thread(receive))
    await eventually(lambda: len(begun) > MAX_PENDING_WRITES, "a write beyond the limit")
    for _ in range(20_000):
        outcome.engine.post(lambda: None)
    assert len(begun) == MAX_PENDING_WRITES + 1 and not written  # the last write is blocked, the posts were not
    busy.set()
    await receiving
    await outcome.engine.call(lambda: None)
    assert written == list(range(MAX_PENDING_WRITES + 10))


async def test_blocked_write_ends_with_its_stop(outcome: Outcome) -> None:
    busy, stop, full = threading.Event(), threading.Event(), threading.Event()
    written: list[int] = []
    outcome.engine.post(busy.wait)

    def receive() -> None:
        for number in count():
            if number == MAX_PENDING_WRITES:
                full.set()
            outcome.engine.write(lambda: written.append(1), stop)
            if stop.is_set():
                return

    receiving = asyncio.ensure_future(asyncio.to_thread(receive))
    assert await asyncio.to_thread(full.wait, HANG_S)
    stop.set()
    async with asyncio.timeout(HANG_S):
        await receiving
    assert not written  # only its stop has freed it: the engine is still busy
    busy.set()
    await outcome.engine.call(lambda: None)
    assert len(written) == MAX_PENDING_WRITES


async def test_closed_thread_refuses_calls_and_ignores_posts(outcome: Outcome) -> None:
    await asyncio.to_thread(outcome.engine.close)
    outcome.engine.post(lambda: None)
    with pytest.raises(Unavailable, match="shutting down"):
        await outcome.engine.call(lambda: None)


class LongStep(Steps):
    """A single step that ends when ``may_end`` is set."""

    def __init__(self) -> None:
        super().__init__(1)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def step(self) -> StepResult:
        self.has_begun.set()
        self.may_end.wait()
        return super().step()


class LayeredStep(LongStep):
    """A step that runs short commands between layers until it may end."""

    def __init__(self, engine: EngineThread) -> None:
        super().__init__()
        self._engine = engine

    def step(self) -> StepResult:
        while not self.may_end.wait(0.001):
            self.has_begun.set()
            self._engine.run_short_commands()
        return Steps.step(self)


async def test_short_commands_run_between_layers_and_others_after_the_step(outcome: Outcome) -> None:
    steps = LayeredStep(outcome.engine)
    await outcome.engine.call(lambda: outcome.install(steps))
    await asyncio.to_thread(steps.has_begun.wait)
    after = outcome.engine.call(lambda: steps.count)
    assert await outcome.engine.call_between_layers(lambda: steps.count) == 1

    def refuse() -> None:
        raise Conflict("not now")

    with pytest.raises(Conflict, match="not now"):
        await outcome.engine.call_between_layers(refuse)
    assert not after.done()
    steps.may_end.set()
    assert await after == 0
    assert await outcome.engine.call_between_layers(lambda: steps.count) == 0, "without a step, at once"
    await asyncio.to_thread(outcome.engine.close)
    with pytest.raises(Unavailable, match="shutting down"):
        await outcome.engine.call_between_layers(lambda: None)


async def test_recording_is_no_stall(outcome: Outcome) -> None:
    """A recording compiles kernels for seconds, in a model whose steps take milliseconds."""
    steps, begin_s = LongStep(), 1000.0
    await outcome.engine.call(lambda: outcome.install(steps))
    await asyncio.to_thread(steps.has_begun.wait)
    latency, liveness = LatencyModel(decode=StepCost(base_s=0.005, num_steps=9)), Liveness(begin_s)
    steps.is_recording = True
    for second in range(26):
        liveness.observe(outcome.engine.progress(latency), begin_s + second)
        assert liveness.fault(begin_s + second) == ""
    steps.num_advances, steps.is_recording = steps.num_advances + 1, False  # recorded; not yet replayed
    liveness.observe(outcome.engine.progress(latency), begin_s + 27)
    assert liveness.fault(begin_s + 27) == ""
    liveness.observe(outcome.engine.progress(latency), begin_s + 31)
    assert "made no step" in liveness.fault(begin_s + 31)  # the replay hangs
    steps.may_end.set()


async def test_progress_shows_advance_hang_and_rest(outcome: Outcome) -> None:
    steps = LongStep()
    await outcome.engine.call(lambda: outcome.install(steps))
    await asyncio.to_thread(steps.has_begun.wait)
    latency = LatencyModel(decode=StepCost(base_s=0.5, num_steps=9))
    begun = outcome.engine.progress(latency)
    assert begun.has_work and begun.expected_s == 0.5
    assert outcome.engine.progress(latency) == begun
    assert outcome.engine.progress(None).expected_s > 5  # the duration of the first step is unknown
    steps.num_advances += 1  # a call of layers
    assert outcome.engine.progress(latency).num_advances == begun.num_advances + 1
    steps.may_end.set()
    await asyncio.to_thread(outcome.engine.close)
    ended = outcome.engine.progress(latency)
    assert not ended.has_work and ended.num_advances > begun.num_advances + 1


async def test_hanging_command_is_work_without_advance(outcome: Outcome) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    outcome.engine.post(has_begun.set)
    outcome.engine.post(may_end.wait)
    await asyncio.to_thread(has_begun.wait)
    while not (progress := outcome.engine.progress(None)).has_work or progress.num_advances < 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert outcome.engine.progress(None) == progress
    may_end.set()
    await asyncio.to_thread(outcome.engine.close)
    assert outcome.engine.progress(None).num_advances > progress.num_advances


PROMPT = prompt_of(40)
SOON_S = 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


class Driven:
    """An instance with the first layers of its model, and the thread that drives it."""

    def __init__(self, model: Model, **settings: Any) -> None:
        self.steps: list[StepResult] = []
        self.faults: list[Exception] = []
        self.engine = EngineThread(self.steps.append, self.faults.append)
        self.clock = Clock()
        self.instance = model.instance(loaded=False, on_segment=self.engine.wake, clock=self.clock, **settings)
        self.num_segments = len(model.pack.manifest.segments)
        self.engine.start()

    async def do(self, command: Callable[[], None]) -> None:
        await self.engine.call(command)

    async def load(self, begin: int, end: int) -> None:
        """Delivers segments from another thread, like the copies to a GPU."""
        with ThreadPoolExecutor(1) as other:
            for segment in range(begin, end):
                await asyncio.get_running_loop().run_in_executor(other, self.instance.segment_ready, segment)

    @property
    def expired(self) -> list[str]:
        return [name for step in self.steps for name in step.expired]


@pytest.fixture
async def driven(model: Model) -> AsyncIterator[Driven]:
    driven = Driven(model)

    def install() -> None:
        driven.engine.instance = driven.instance

    await driven.load(0, 2)
    await driven.do(install)
    yield driven
    driven.instance.fail("the test is over")
    await asyncio.to_thread(driven.engine.close)
    driven.instance.close()


async def test_held_prompt_expires_on_idle_thread(driven: Driven) -> None:
    """The prompt has reached the last layer that is here."""
    group = replace(group_of(PROMPT), deadline_s=Clock.now_s + SOON_S)
    gone = replace(group_of(PROMPT, "gone/0"), deadline_s=Clock.now_s + SOON_S / 2)
    max_sleep_s, rests = driven.instance.max_sleep_s, []

    def rest() -> float | None:
        rests.append(max_sleep_s())
        driven.clock.now_s += rests[-1] or 0.0  # the time at which the thread wakes
        return rests[-1]

    def ask() -> None:
        driven.instance.max_sleep_s = rest  # type: ignore[method-assign]
        driven.instance.prefill(gone)
        driven.instance.cancel("gone/0")
        driven.instance.prefill(group)

    await driven.do(ask)
    await eventually(lambda: driven.expired == ["r/0"])
    assert rests[:2] == [0.0, pytest.approx(SOON_S)]
    assert driven.instance.num_free_pages == driven.instance.num_pages
    assert [step.num_positions_prefilled for step in driven.steps if not step.expired] == [0]  # one layer, then idle


async def test_group_without_kv_expires(driven: Driven) -> None:
    group = replace(group_of(PROMPT), prompt=(), deadline_s=Clock.now_s + SOON_S)
    await driven.do(lambda: _adopt(driven.instance, group))
    assert driven.expired == []
    driven.clock.now_s += SOON_S
    await eventually(lambda: driven.expired == ["r/0"])
    assert driven.instance.num_free_pages == driven.instance.num_pages


async def test_layer_by_layer_prompt_continues_with_each_segment(driven: Driven, model: Model) -> None:
    group = replace(group_of(PROMPT), deadline_s=1e300)  # beyond the timeout of any lock or queue
    await driven.do(lambda: driven.instance.prefill(group))

    def boundaries() -> list[int]:
        return [group.layer for group in driven.instance._scheduler.by_layer]

    for segment in range(2, driven.num_segments):  # the last is the head
        await eventually(lambda segment=segment: boundaries() == [segment - 1])  # type: ignore[misc]
        await driven.load(segment, segment + 1)
    await eventually(lambda: any(token.finish for step in driven.steps for token in step.tokens))
    assert outputs(driven.steps)["r/0", 0] == model.expected(PROMPT)


async def test_layer_by_layer_prompt_fails_with_load(driven: Driven) -> None:
    await driven.do(lambda: driven.instance.prefill(group_of(PROMPT)))
    await eventually(lambda: bool(driven.steps))
    driven.instance.fail("no holder is left")
    await eventually(lambda: bool(driven.faults))
    assert "no holder is left" in str(driven.faults[0])


def _adopt(instance: Instance, group: GroupSpec) -> None:
    instance.import_kv(group, instance.kv_layout(group))


async def test_prompt_and_unload_wait_for_the_running_preparation_alone(model: Model) -> None:
    """The thread prepares by itself once the last segment is here; what waits then comes before the next."""
    driven = Driven(model, backends=replace(backends_for(torch.device("cpu")), capturer=CallingCapturer()))
    instance, engine, begun, may_end = driven.instance, driven.engine, threading.Event(), threading.Event()
    made: list[str] = []

    def first() -> None:
        begun.set()
        may_end.wait()
        made.append("first")

    def install() -> None:
        instance.model._preparations.extend([first, lambda: made.append("second")])
        engine.instance = instance

    await driven.do(install)
    await driven.load(0, driven.num_segments)
    assert await asyncio.to_thread(begun.wait, HANG_S)
    sampling = SamplingParams(temperature=0, max_tokens=3)
    prefill = engine.call(lambda: instance.prefill(group_of(PROMPT, sampling=sampling)))
    order = engine.call(lambda: tuple(made))
    may_end.set()
    await prefill
    assert await order == ("first",)
    await eventually(lambda: len(made) == 2, "the second preparation, once the prompt is answered")
    assert outputs(driven.steps) == {("r/0", 0): model.expected(PROMPT, 3)}

    def unload() -> None:
        instance.model._preparations.append(lambda: made.append("third"))
        engine.instance = None
        instance.close()

    await driven.do(unload)
    await asyncio.to_thread(engine.close)
    assert made == ["first", "second"] and not driven.faults
