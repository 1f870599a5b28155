"""The life of a stack, with real child processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.small_disk import small_disk
from tests.support.wait import eventually
from tests.unit.cli.up.children.programs import ANSWERS, NEVER_READY, SERVE, STUBBORN, Programs, Recorder, is_running
from torchrelay.cli.errors import CliError
from torchrelay.cli.launchers.launcher import Launcher
from torchrelay.cli.up.children import supervisor as supervisor_module
from torchrelay.cli.up.children.child import Child, ChildSpec
from torchrelay.cli.up.children.stack import Stack
from torchrelay.cli.up.children.supervisor import BACKOFF_RESET_S, MAX_BACKOFF_S, Supervisor, backoff_s


class Life:
    """A supervisor under test: ``up`` is set once all is ready."""

    def __init__(self, stack: Stack, drive: Callable[[Launcher], Coroutine[None, None, None]] | None = None) -> None:
        self.recorder, self.stop, self.up = Recorder(), asyncio.Event(), asyncio.Event()
        self.supervisor = Supervisor(stack, self.recorder, drive)

    @contextmanager
    def _up(self) -> Iterator[None]:
        self.up.set()
        yield

    async def run(self) -> None:
        await self.supervisor.run(self._up, self.stop)


@asynccontextmanager
async def living(stack: Stack) -> AsyncIterator[Life]:
    """A supervisor whose children are ready, and which is stopped in order at the end."""
    life = Life(stack)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(life.run())
        await life.up.wait()
        yield life
        life.stop.set()


def pid_of(spec: ChildSpec) -> int:
    assert spec.ready_file is not None
    return int(json.loads(spec.ready_file.read_text())["pid"])


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


async def test_starts_in_waves_and_stops_group_by_group(programs: Programs) -> None:
    """Each run has a new log beside the previous one."""
    broker, store, gateway = (programs.spec(name) for name in ("broker", "store", "gateway"))
    store.log.write_text("of the last run\n")
    async with living(programs.stack([broker], [store], [gateway])) as life:
        pids = [pid_of(spec) for spec in (broker, store, gateway)]
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    assert life.recorder.said[:2] == [("starting", "broker"), ("ready", "broker")]
    assert programs.trail.read_text().split("\n")[:3] == ["gateway stopped", "store stopped", "broker stopped"]
    assert store.log.with_name("store.log.1").read_text() == "of the last run\n"
    assert "of the last run" not in store.log.read_text()


async def test_dead_child_is_restarted(programs: Programs) -> None:
    broker, worker = programs.spec("broker"), programs.spec("worker")
    async with living(programs.stack([broker], [worker])) as life:
        before = pid_of(worker)
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: life.recorder.said.count(("ready", "worker")) == 2)
        after = pid_of(worker)
        assert after != before
        assert is_running(after)
    assert ("was killed by SIGKILL", "worker") in life.recorder.said
    assert not is_running(after)


async def test_hung_child_is_killed_and_restarted(programs: Programs) -> None:
    steady, hung = programs.spec("steady", ANSWERS), programs.spec("hung", ANSWERS)
    async with living(programs.stack([steady], [hung])) as life:
        steady_pid, hung_pid = pid_of(steady), pid_of(hung)
        os.kill(hung_pid, signal.SIGSTOP)
        await eventually(lambda: life.recorder.said.count(("ready", "hung")) == 2)
        assert pid_of(hung) != hung_pid and not is_running(hung_pid)
        assert pid_of(steady) == steady_pid
    assert ("did not answer for 5 s; killed", "hung") in life.recorder.said


def faulty(programs: Programs) -> tuple[ChildSpec, Path]:
    """A worker whose program fails for as long as the file is there."""
    bad = programs.folder / "bad"
    code = f"import pathlib, sys\nif pathlib.Path({str(bad)!r}).exists(): sys.exit(7)\n"
    return programs.spec("worker", code + SERVE), bad


async def test_failed_restart_is_retried_with_backoff(programs: Programs) -> None:
    worker, bad = faulty(programs)
    async with living(programs.stack([], [worker])) as life:
        bad.touch()
        os.kill(pid_of(worker), signal.SIGKILL)
        await eventually(lambda: len(life.recorder.waits_s) >= 3)
        bad.unlink()
        await eventually(lambda: life.recorder.said.count(("ready", "worker")) == 2)
    assert life.recorder.waits_s[:3] == [0.1, 0.2, 0.4]
    assert ("failed", "worker ended with status 7 while starting") in life.recorder.said


async def test_failed_start_of_an_elastic_child_is_retried_with_backoff(programs: Programs) -> None:
    """The driver wants it all the time."""
    worker, bad = faulty(programs)
    bad.touch()

    async def drive(launcher: Launcher) -> None:
        while True:
            launcher.scale(1)
            await asyncio.sleep(0.01)

    life = Life(replace(programs.stack([], [worker]), elastic=frozenset({"worker"})), drive)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(life.run())
        await eventually(lambda: len(life.recorder.waits_s) >= 3)
        bad.unlink()
        await eventually(lambda: ("ready", "worker") in life.recorder.said)
        life.stop.set()
    assert life.recorder.waits_s[:3] == [0.1, 0.2, 0.4]
    assert ("failed", "worker ended with status 7 while starting") in life.recorder.said


async def test_vanished_program_is_retried_with_backoff(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_RESET_S", 1e-3)  # its first run was a steady one
    worker, program = programs.spec("worker"), programs.folder / "program"
    program.symlink_to(sys.executable)
    async with living(programs.stack([], [replace(worker, command=(str(program), *worker.command[1:]))])) as life:
        program.unlink()
        os.kill(pid_of(worker), signal.SIGKILL)
        await eventually(lambda: len(life.recorder.waits_s) >= 3)
    assert life.recorder.waits_s[:3] == [0.1, 0.2, 0.4]


async def test_failed_start_stops_others_and_shows_log(programs: Programs) -> None:
    good = programs.spec("good")
    bad = programs.spec("bad", "import sys; print('no such [setting]', file=sys.stderr); sys.exit(3)")
    bad.log.write_text("of an earlier start\n")
    slow = programs.spec("slow", NEVER_READY)
    life = Life(programs.stack([good], [bad, slow]))
    with pytest.raises(CliError, match="bad ended with status 3 while starting") as caught:
        await life.run()
    assert "no such [setting]" in caught.value.hint
    assert "of an earlier start" not in caught.value.hint
    assert not life.up.is_set()
    assert programs.trail.read_text() == "good stopped\n"


async def test_unready_child_or_missing_program_fails_the_start(programs: Programs) -> None:
    missing = ChildSpec("ghost", (str(programs.folder / "ghost"),), programs.folder / "ghost.log")
    slow = programs.spec("slow", NEVER_READY, ready_s=0.3)
    for spec, said in ((slow, r"slow was not ready within 0\.3 s"), (missing, "is not installed")):
        with pytest.raises(CliError, match=said):
            await Life(programs.stack([spec])).run()


async def test_stop_during_start_is_prompt(programs: Programs) -> None:
    good, slow = programs.spec("good"), programs.spec("slow", NEVER_READY)
    life = Life(programs.stack([good], [slow]))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(life.run())
        await eventually(lambda: ("starting", "slow") in life.recorder.said)
        life.stop.set()
        await eventually(lambda: programs.trail.exists())  # long before ``slow`` exceeds its limit
    assert not life.up.is_set()
    assert life.recorder.said[-1] == ("stopping", "")


async def test_unstoppable_child_is_killed_with_its_children(programs: Programs) -> None:
    spec = replace(programs.spec("stubborn", STUBBORN), stop_s=0.2)
    child = await Child.start(spec)
    grandchild = int((await child.ready())["grandchild"])
    assert is_running(grandchild)
    await child.stop()
    assert not is_running(child.pid)
    await eventually(lambda: not is_running(grandchild))


async def test_kill_all_ends_children_at_once(programs: Programs) -> None:
    spec = replace(programs.spec("stubborn", STUBBORN), stop_s=600.0)
    async with living(programs.stack([spec])) as life:
        child = life.supervisor._children["stubborn"].pid
        life.stop.set()
        await eventually(lambda: ("stopping", "") in life.recorder.said)
        assert is_running(child)
        life.supervisor.kill_all()
    assert not is_running(child)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child cannot ask to end with its parent")
async def test_children_end_with_killed_parent(programs: Programs) -> None:
    """The parent is a process of its own that starts a child as `up` does."""
    spec = programs.spec("orphan")
    code = (
        "import asyncio, pathlib, signal, sys\n"
        "from torchrelay.cli.up.children.child import Child, ChildSpec\n"
        "async def main():\n"
        "    ready = pathlib.Path(sys.argv[1])\n"
        "    child = await Child.start(ChildSpec('orphan', tuple(sys.argv[2:]), ready.with_suffix('.log'),"
        " ready_file=ready))\n"
        "    await child.ready()\n"
        "    print(child.pid, flush=True)\n"
        "    await child.exited()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(spec.ready_file), *spec.command]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    await parent.communicate()
    await eventually(lambda: not is_running(pid))


def test_backoff_doubles_and_resets_after_steady_run() -> None:
    waits = [0.0]
    for _ in range(10):
        waits.append(backoff_s(waits[-1], ran_s=0.5))
    assert waits[1:5] == [0.1, 0.2, 0.4, 0.8]
    assert waits[-1] == MAX_BACKOFF_S
    assert backoff_s(MAX_BACKOFF_S, BACKOFF_RESET_S) == 0.1


async def test_start_error_quotes_childs_reason(programs: Programs) -> None:
    program = Path(programs.spec("worker").command[0]).name
    spec = programs.spec("worker", f"import sys; sys.exit('{program}: device: there is no GPU')")
    with pytest.raises(CliError, match=r"^worker cannot start: device: there is no GPU$") as caught:
        await (await Child.start(spec)).ready()
    assert str(spec.log) in caught.value.hint


@pytest.mark.lab
async def test_nats_restarts_after_full_disk(programs: Programs) -> None:
    nats, gateway = programs.spec("nats"), programs.spec("gateway")
    with small_disk(programs.folder / "home", 1 << 30) as disk:
        async with living(replace(programs.stack([nats], [gateway]), home=disk.folder)) as life:
            pids = pid_of(nats), pid_of(gateway)
            disk.fill()
            await eventually(lambda: any("it is full" in message for _, message in life.recorder.said))
            assert (pid_of(nats), pid_of(gateway)) == pids
            disk.free()
            await eventually(lambda: ("was killed by SIGKILL", "nats") in life.recorder.said)
            await eventually(lambda: life.recorder.said.count(("ready", "nats")) == 2)
            assert pid_of(nats) != pids[0] and pid_of(gateway) == pids[1]


@pytest.mark.lab
async def test_child_without_log_folder_is_retried(programs: Programs) -> None:
    with small_disk(programs.folder / "home", 1 << 20) as disk:
        worker = replace(programs.spec("worker"), log=disk.folder / "logs" / "worker.log")
        worker.log.parent.mkdir()
        async with living(programs.stack([], [worker])) as life:
            before = pid_of(worker)
            shutil.rmtree(worker.log.parent)
            os.kill(before, signal.SIGKILL)
            await eventually(lambda: any(what == "failed" for what, _ in life.recorder.said))
            worker.log.parent.mkdir()
            await eventually(lambda: life.recorder.said.count(("ready", "worker")) == 2)
            assert pid_of(worker) != before and worker.log.exists()
