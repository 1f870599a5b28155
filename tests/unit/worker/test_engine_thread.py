"""The engine's thread runs commands between steps, steps while there is work, and reports what goes wrong."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from torchrelay.common.errors import Conflict
from torchrelay.engine.core import EMPTY_STEP, LoadFailed, StepResult
from torchrelay.engine.instance import Instance
from torchrelay.worker.engine_thread import EngineThread


class Steps:
    """Stands where an instance does: has work for a number of steps."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.threads: set[int] = set()

    def has_work(self) -> bool:
        return self.count > 0 or self.error is not None

    def step(self) -> StepResult:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        self.count -= 1
        return EMPTY_STEP


class Outcome:
    """What the thread told the loop."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.faults: list[Exception] = []
        self.engine = EngineThread(self.steps.append, self.faults.append)

    def install(self, steps: Steps) -> None:
        self.engine.instance = cast(Instance, cast(Any, steps))


async def test_steps_run_on_one_thread_while_there_is_work() -> None:
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


async def test_a_command_returns_its_value_or_its_error() -> None:
    outcome = Outcome()
    outcome.engine.start()

    def refuse() -> None:
        raise Conflict("not now")

    assert await outcome.engine.call(lambda: 41 + 1) == 42
    with pytest.raises(Conflict, match="not now"):
        await outcome.engine.call(refuse)
    await asyncio.to_thread(outcome.engine.close)


@pytest.mark.parametrize("error", [LoadFailed("the disk is gone"), RuntimeError("a kernel broke")])
async def test_a_failing_step_gives_the_instance_up_and_says_why(error: Exception) -> None:
    outcome = Outcome()
    outcome.engine.start()
    await outcome.engine.call(lambda: outcome.install(Steps(0, error)))
    async with asyncio.timeout(5):
        while not outcome.faults:
            await outcome.engine.call(lambda: None)
    assert await outcome.engine.call(lambda: outcome.engine.instance) is None
    await asyncio.to_thread(outcome.engine.close)
    assert outcome.faults == [error]
