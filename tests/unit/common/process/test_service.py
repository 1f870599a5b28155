"""The life of a service process: a signal ends it in order when it serves, and at once while it starts."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.wait import HANG_S, wait_until
from torchrelay.common.process.watchdog import watched_event_loop

PROGRAM = """
import asyncio, ctypes, os, sys
from contextlib import asynccontextmanager
from pathlib import Path
from torchrelay.common.process.service import Serving, run_service
from torchrelay.common.process.settings import ServiceSettings

folder = Path(sys.argv[1])

async def leave(grace_s):
    (folder / "leaving").write_text(str(grace_s))
    while not (folder / "done").exists():
        await asyncio.sleep(0.01)
    (folder / "left").touch()

@asynccontextmanager
async def serving():
    try:
        (folder / "begun").touch()
        if sys.argv[2] == "stuck":
            await asyncio.Event().wait()
        loop = asyncio.get_running_loop()
        if sys.argv[2] == "never_ends":
            os.mkfifo(folder / "pipe")
            loop.run_in_executor(None, (folder / "pipe").read_bytes)
        if sys.argv[2] == "hangs_with_gil":
            loop.call_soon(ctypes.PyDLL(None).sleep, 60)
        addresses = {"grpc": "127.0.0.1:1"}
        yield Serving(addresses, leave) if sys.argv[2] == "leaves" else addresses
        (folder / "ended").touch()
    finally:
        (folder / "cleaned").touch()

settings = ServiceSettings(ready_file=folder / "ready.json", watchdog_s=float(sys.argv[3]))
run_service("test", settings, serving, stop_limit_s=1 if sys.argv[2] == "never_ends" else 0)
"""


def run(folder: Path, kind: str, watchdog_s: float = 20) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), kind, str(watchdog_s)], stderr=log)


def await_file(path: Path) -> None:
    wait_until(path.exists, f"{path}")


def test_waiting_start_stops_at_once(tmp_path: Path) -> None:
    process = run(tmp_path, "stuck")
    await_file(tmp_path / "begun")
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0
    assert (tmp_path / "cleaned").exists() and not (tmp_path / "ended").exists()


def test_blocked_thread_does_not_delay_exit(tmp_path: Path) -> None:
    process = run(tmp_path, "never_ends")
    try:
        await_file(tmp_path / "ready.json")
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == -signal.SIGALRM
        assert (tmp_path / "ended").exists() and not (tmp_path / "ready.json").exists()  # what can, ends in order
    finally:
        process.kill()


def test_blocked_event_loop_ends_process_with_stacks(tmp_path: Path) -> None:
    process = run(tmp_path, "hangs_with_gil", watchdog_s=1)
    try:
        assert process.wait(HANG_S) == 1
    finally:
        process.kill()
    log = (tmp_path / "log").read_text()
    assert "Timeout (0:00:01)!" in log and "most recent call first" in log and "in run_service" in log
    assert not (tmp_path / "cleaned").exists()


async def test_watchdog_is_set_anew_while_the_event_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_s, is_set_again = list[float](), asyncio.Event()

    def set_limit(limit_s: float, **_: object) -> None:
        limits_s.append(limit_s)
        if len(limits_s) == 3:
            is_set_again.set()

    monkeypatch.setattr(faulthandler, "dump_traceback_later", set_limit)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: limits_s.append(0.0))
    async with asyncio.timeout(HANG_S):
        with watched_event_loop(0.01):
            await is_set_again.wait()
    assert limits_s == [0.01] * (len(limits_s) - 1) + [0.0]
    with watched_event_loop(0):
        assert limits_s[-1] == 0.0, "a limit of 0 sets no watchdog"


@pytest.mark.parametrize("ends", ["done", "second_signal"])
def test_sigterm_lets_the_service_leave(tmp_path: Path, ends: str) -> None:
    process = run(tmp_path, "leaves")
    await_file(tmp_path / "ready.json")
    assert json.loads((tmp_path / "ready.json").read_text()) == {"grpc": "127.0.0.1:1", "pid": process.pid}
    process.send_signal(signal.SIGTERM)
    await_file(tmp_path / "leaving")
    assert not (tmp_path / "ready.json").exists() and not (tmp_path / "ended").exists()
    if ends == "done":
        (tmp_path / "done").touch()
    else:
        process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 0
    assert (tmp_path / "ended").exists() and (tmp_path / "left").exists() is (ends == "done")


def test_sigint_leaves_no_time(tmp_path: Path) -> None:
    process = run(tmp_path, "leaves")
    await_file(tmp_path / "ready.json")
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == 0
    assert (tmp_path / "ended").exists() and not (tmp_path / "leaving").exists()
    assert not (tmp_path / "ready.json").exists()
