"""The engine's thread runs commands between steps, steps while there is work, and reports faults."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from typing import Any, cast

import pytest

from tests.support.wait import HANG_S, eventually
from torchrelay.common.errors import Conflict, Unavailable
from torchrelay.common.latency.latency_model import LatencyModel, StepCost, StepWork
from torchrelay.common.liveness import Liveness
from torchrelay.engine.core import EMPTY_STEP, LoadFailed, StepResult
from torchrelay.engine.instance import Instance
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


async def test_steps_run_on_engine_thread_while_there_is_work() -> None:
    outcome, steps = Outcome(), Steps(5)
    outcome.engine.start()
    await outcome.engine.call(lambda: outcome.install(steps))
    while steps.count:
        await outcome.engine.call(lambda: None)  # commands run between the steps
    await outcome.engine.call(lambda: None)
    await asyncio.to_thread(outcome.engine.close)
    await asyncio.sleep(0)
    assert len(outcome.steps) == 5 and not outcome.faults
    assert len(steps.threads) == 1 and threading.get_ident() not in steps.threads


async def test_call_returns_value_or_error() -> None:
    outcome = Outcome()
    outcome.engine.start()

    def refuse() -> None:
        raise Conflict("not now")

    assert await outcome.engine.call(lambda: 41 + 1) == 42
    with pytest.raises(Conflict, match="not now"):
        await outcome.engine.call(refuse)
    await asyncio.to_thread(outcome.engine.close)


@pytest.mark.parametrize("error", [LoadFailed("the disk is gone"), RuntimeError("a kernel broke")])
async def test_failing_step_gives_up_instance_and_reports(error: Exception) -> None:
    outcome = Outcome()
    outcome.engine.start()
    await outcome.engine.call(lambda: outcome.install(Steps(0, error)))
    async with asyncio.timeout(HANG_S):
        while not outcome.faults:
            await outcome.engine.call(lambda: None)
    assert await outcome.engine.call(lambda: outcome.engine.instance) is None
    await asyncio.to_thread(outcome.engine.close)
    assert outcome.faults == [error]


async def test_busy_engine_blocks_writes_but_not_posts() -> None:
    """A step that waits for layers must block the senders, but not the posting of a cancel."""
    outcome, busy, stop = Outcome(), threading.Event(), threading.Event()
    outcome.engine.start()
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
    await asyncio.to_thread(outcome.engine.close)


async def test_blocked_write_ends_with_its_stop() -> None:
    outcome, busy, stop, full = Outcome(), threading.Event(), threading.Event(), threading.Event()
    written: list[int] = []
    outcome.engine.start()
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
    await asyncio.to_thread(outcome.engine.close)


async def test_closed_thread_refuses_calls_and_ignores_posts() -> None:
    outcome = Outcome()
    outcome.engine.start()
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


async def test_short_commands_run_between_layers_and_others_after_the_step() -> None:
    outcome = Outcome()
    steps = LayeredStep(outcome.engine)
    outcome.engine.start()
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


async def test_recording_is_no_stall() -> None:
    """A recording compiles kernels for seconds, in a model whose steps take milliseconds."""
    outcome, steps, begin_s = Outcome(), LongStep(), 1000.0
    outcome.engine.start()
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
    await asyncio.to_thread(outcome.engine.close)


async def test_progress_shows_advance_hang_and_rest() -> None:
    outcome, steps = Outcome(), LongStep()
    outcome.engine.start()
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


async def test_hanging_command_is_work_without_advance() -> None:
    outcome, has_begun, may_end = Outcome(), threading.Event(), threading.Event()
    outcome.engine.start()
    outcome.engine.post(has_begun.set)
    outcome.engine.post(may_end.wait)
    await asyncio.to_thread(has_begun.wait)
    while not (progress := outcome.engine.progress(None)).has_work or progress.num_advances < 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert outcome.engine.progress(None) == progress
    may_end.set()
    await asyncio.to_thread(outcome.engine.close)
    assert outcome.engine.progress(None).num_advances > progress.num_advances
