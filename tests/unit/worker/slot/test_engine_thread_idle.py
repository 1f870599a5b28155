"""Events that wake an idle engine thread: deadlines, segments, cancels while prompts wait for weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.wait import eventually
from tests.unit.engine.harness import Clock, Model, group_of, outputs, prompt_of
from torchrelay.engine.core import GroupSpec, StepResult
from torchrelay.engine.instance import Instance
from torchrelay.worker.slot.engine_thread import EngineThread

PROMPT = prompt_of(40)
SOON_S = 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


class Driven:
    """An instance with the first layers of its model, and the thread that drives it."""

    def __init__(self, model: Model) -> None:
        self.steps: list[StepResult] = []
        self.faults: list[Exception] = []
        self.engine = EngineThread(self.steps.append, self.faults.append)
        self.clock = Clock()
        self.instance = model.instance(loaded=False, on_segment=self.engine.wake, clock=self.clock)
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


async def test_cancelled_prompt_that_waits_for_weights_frees_its_pages(driven: Driven) -> None:
    await driven.do(lambda: driven.instance.prefill(group_of(PROMPT)))
    await eventually(lambda: driven.instance.num_free_pages < driven.instance.num_pages)
    await driven.do(lambda: driven.instance.cancel("r/0"))
    assert driven.instance.num_free_pages == driven.instance.num_pages


def _adopt(instance: Instance, group: GroupSpec) -> None:
    instance.import_kv(group, instance.kv_layout(group))
