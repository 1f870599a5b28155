"""A child counts as hung after several looks in a row without a good answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from torchrelay.cli.up.children.liveness import await_fault, probe_of
from torchrelay.common.net.probes import GrpcProbe, HttpProbe, NatsProbe, RedisProbe

LOOK_S = 0.005


class ScriptedChild:
    """A probe of a child that takes the next of ``answers`` each time: its fault, or None for no answer."""

    def __init__(self, answers: Sequence[str | None]) -> None:
        self._answers = iter(answers)
        self.num_asked = 0
        self.is_closed = False
        self.is_leaving = False

    async def ask(self) -> str:
        self.num_asked += 1
        answer = next(self._answers)
        if answer is None:
            await asyncio.Event().wait()
        return answer or ""

    async def close(self) -> None:
        self.is_closed = True


@asynccontextmanager
async def watched(child: ScriptedChild, max_missed: int = 5) -> AsyncIterator[asyncio.Task[str]]:
    async with asyncio.timeout(60):
        task = asyncio.create_task(await_fault(child, lambda: child.is_leaving, LOOK_S, max_missed))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})
    assert child.is_closed


async def test_silent_child_counts_as_hung() -> None:
    child = ScriptedChild(["", "", None])
    async with watched(child) as task:
        assert await task == "did not answer for 0.025 s"
    assert child.num_asked == 3  # an open question is not repeated


async def test_fault_names_childs_reason() -> None:
    child = ScriptedChild(["", *["cannot serve: the engine has made no step for 60 s"] * 5])
    async with watched(child) as task:
        assert await task == "cannot serve: the engine has made no step for 60 s for 0.025 s"


async def test_answer_clears_missed_looks() -> None:
    bad = ["refuses connections"] * 4
    child = ScriptedChild([*bad, "", *bad, "", *bad, "refuses connections"])
    async with watched(child) as task:
        await task
    assert child.num_asked == 15


async def test_leaving_child_does_not_count_as_hung() -> None:
    child = ScriptedChild(["refuses connections"] * 100)
    child.is_leaving = True
    async with watched(child) as task:
        while child.num_asked < 20:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        assert not task.done()
        child.is_leaving = False
        await task


async def test_stopped_watcher_misses_single_look() -> None:
    """As after a suspension of `up`: the answer has already arrived, and the next look sees it."""
    child = ScriptedChild([""] * 100)
    async with watched(child, max_missed=2) as task:
        while child.num_asked < 2:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        time.sleep(LOOK_S * 20)  # noqa: ASYNC251  (the event loop stands still)
        num_asked = child.num_asked
        while child.num_asked < num_asked + 3:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        assert not task.done()


@pytest.mark.parametrize(
    ("broker_url", "addresses", "kind"),
    [
        ("redis://:secret@127.0.0.1:1/0", {}, RedisProbe),
        ("nats://127.0.0.1:1", {}, NatsProbe),
        ("", {"http": "http://127.0.0.1:1", "grpc": "127.0.0.1:2"}, HttpProbe),
        ("", {"grpc": "127.0.0.1:2", "data": "127.0.0.1:3"}, GrpcProbe),
    ],
)
async def test_every_kind_of_child_has_its_probe(broker_url: str, addresses: dict[str, str], kind: type) -> None:
    probe = probe_of(broker_url, addresses, None)
    assert probe is not None and type(probe) is kind
    await probe.close()
    assert probe_of("", {"pid": "1"}, None) is None
