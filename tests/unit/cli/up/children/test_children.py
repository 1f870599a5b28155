"""Children of `torchrelay up`: their logs, whether they live, and workers that a launcher starts and stops."""

from __future__ import annotations

import asyncio
import errno
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.wait import eventually, wait_until
from torchrelay.cli.up.children.child import ChildSpec
from torchrelay.cli.up.children.liveness import await_fault, probe_of
from torchrelay.cli.up.children.local_launcher import LocalLauncher
from torchrelay.cli.up.children.logs import rotate, rotated_path, truncate_if_long
from torchrelay.common.net.probes import GrpcProbe, HttpProbe, NatsProbe, RedisProbe

TALKER = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def test_run_starts_new_log_and_keeps_previous(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    rotate(log)  # there is none yet
    for run in ("first", "second", "third"):
        rotate(log)
        log.write_text(run)
    assert (log.read_text(), rotated_path(log).read_text()) == ("third", "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gateway.log", "gateway.log.1"]


def test_long_log_is_truncated_under_writer(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    with log.open("ab") as file:
        child = subprocess.Popen([sys.executable, "-c", TALKER], stdin=subprocess.PIPE, stdout=file, text=True)
    assert child.stdin is not None
    child.stdin.write("x" * 2000 + "\n")
    child.stdin.flush()
    wait_until(lambda: log.stat().st_size >= 2001)
    truncate_if_long(log, max_bytes=2001)
    assert log.stat().st_size == 2001  # not too long yet
    truncate_if_long(log, max_bytes=2000)
    assert log.stat().st_size == 0
    child.stdin.write("goes on\n")
    child.stdin.close()
    assert child.wait(10) == 0
    assert log.read_text() == "goes on\n"  # from the beginning of the file, without a hole
    assert rotated_path(log).read_text() == "x" * 2000 + "\n"


def test_full_disk_truncates_log_without_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(log: Path, copy: Path) -> None:
        copy.write_text("a part of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    log = tmp_path / "gateway.log"
    log.write_text("x" * 100)
    monkeypatch.setattr(shutil, "copyfile", full)
    truncate_if_long(log, max_bytes=99)
    assert log.read_text() == ""
    assert not rotated_path(log).exists()


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


STUCK, BAD = "cannot serve: the engine has made no step for 60 s", ["refuses connections"] * 4


@pytest.mark.parametrize(
    ("answers", "said", "num_asked"),
    [
        (["", "", None], "did not answer", 3),  # an open question is not repeated
        (["", *[STUCK] * 5], STUCK, 6),
        ([*BAD, "", *BAD, "", *BAD, BAD[0]], BAD[0], 15),  # an answer clears missed looks
    ],
)
async def test_hung_child_is_named_with_its_reason(answers: list[str | None], said: str, num_asked: int) -> None:
    child = ScriptedChild(answers)
    async with watched(child) as task:
        assert await task == f"{said} for 0.025 s"
    assert child.num_asked == num_asked


async def test_leaving_child_does_not_count_as_hung() -> None:
    child = ScriptedChild(["refuses connections"] * 100)
    child.is_leaving = True
    async with watched(child) as task:
        await eventually(lambda: child.num_asked >= 20)
        assert not task.done()
        child.is_leaving = False
        await task


async def test_stopped_watcher_misses_single_look() -> None:
    """As after a suspension of `up`: the answer has already arrived, and the next look sees it."""
    child = ScriptedChild([""] * 100)
    async with watched(child, max_missed=2) as task:
        await eventually(lambda: child.num_asked >= 2)
        time.sleep(LOOK_S * 20)  # noqa: ASYNC251  (the event loop stands still)
        num_asked = child.num_asked
        await eventually(lambda: child.num_asked >= num_asked + 3)
        assert not task.done()


async def test_every_kind_of_child_has_its_probe() -> None:
    for broker_url, addresses, kind in (
        ("redis://:secret@127.0.0.1:1/0", {}, RedisProbe),
        ("nats://127.0.0.1:1", {}, NatsProbe),
        ("", {"http": "http://127.0.0.1:1", "grpc": "127.0.0.1:2"}, HttpProbe),
        ("", {"grpc": "127.0.0.1:2", "data": "127.0.0.1:3"}, GrpcProbe),
    ):
        probe = probe_of(broker_url, addresses, None)
        assert probe is not None and type(probe) is kind
        await probe.close()
        assert probe_of("", {"pid": "1"}, None) is None


async def test_workers_start_in_order_and_retire_by_name() -> None:
    specs = [ChildSpec(f"worker-{number}", ("true",), Path("unused.log")) for number in range(3)]
    started: list[str] = []
    ended: list[str] = []
    stopped: list[str] = []

    async def run(spec: ChildSpec) -> None:
        started.append(spec.name)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(spec.name)

    async def stop(name: str) -> None:
        assert name in ended, "nothing restarts it any more"
        stopped.append(name)

    async with asyncio.TaskGroup() as tasks:
        launcher = LocalLauncher(specs, tasks, run, stop)
        launcher.scale(2)
        await asyncio.sleep(0)
        assert started == ["worker-0", "worker-1"] == list(launcher.members())
        launcher.scale(1)
        assert len(launcher.members()) == 2, "scale stops none"
        launcher.retire("worker-0")
        assert list(launcher.members()) == ["worker-1"]
        await eventually(lambda: stopped == ["worker-0"])
        launcher.scale(9)
        await asyncio.sleep(0)
        assert sorted(launcher.members()) == ["worker-0", "worker-1", "worker-2"]
        for name in tuple(launcher.members()):
            launcher.retire(name)
        assert not launcher.members()


async def test_worker_starts_while_another_retires_which_starts_again_once_it_is_gone() -> None:
    specs = [ChildSpec(f"worker-{number}", ("true",), Path("unused.log")) for number in range(2)]
    started: list[str] = []
    gone = asyncio.Event()

    async def run(spec: ChildSpec) -> None:
        started.append(spec.name)
        await asyncio.Event().wait()

    async def stop(name: str) -> None:
        await gone.wait()

    async with asyncio.TaskGroup() as tasks:
        launcher = LocalLauncher(specs, tasks, run, stop)
        launcher.scale(1)
        await eventually(lambda: started == ["worker-0"])
        launcher.retire("worker-0")
        launcher.scale(2)
        await eventually(lambda: started == ["worker-0", "worker-1"])
        assert list(launcher.members()) == ["worker-1"], "the process of the other still runs"
        gone.set()

        def starts_again() -> bool:
            launcher.scale(2)
            return started[2:] == ["worker-0"]

        await eventually(starts_again)
        for name in tuple(launcher.members()):
            launcher.retire(name)


async def test_worker_that_cannot_start_is_no_member() -> None:
    async def run(spec: ChildSpec) -> None:
        return

    async def stop(name: str) -> None:
        raise AssertionError(name)

    async with asyncio.TaskGroup() as tasks:
        launcher = LocalLauncher([ChildSpec("worker-0", ("true",), Path("unused.log"))], tasks, run, stop)
        launcher.scale(1)
    assert not launcher.members()
