"""Workers that a launcher starts and stops as children."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.wait import eventually
from torchrelay.cli.up.children.child import ChildSpec
from torchrelay.cli.up.children.local_launcher import LocalLauncher


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
