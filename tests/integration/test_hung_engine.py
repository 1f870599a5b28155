"""A worker whose engine hangs ends itself, wherever nobody replaces it; one that was only paused does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.wait import HANG_S, wait_until
from torchrelay.common.identity.keys import derive_node_key

# Its first command hangs, or takes two seconds; as a step of a known length would, it is expected to take no time.
LOOK_S = 0.2  # of the program
PROGRAM = """
import sys, time
from contextlib import asynccontextmanager
from pathlib import Path
from torchrelay.common.process.service import run_service
from torchrelay.common.process.settings import load_settings
from torchrelay.worker import main
from torchrelay.worker.main import running_worker, watched_engine
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot import engine_thread

begun, hang_s = Path(sys.argv.pop(1)), float(sys.argv.pop(1))

@asynccontextmanager
async def serving():
    async with running_worker(settings) as (worker, addresses), watched_engine(worker):
        engine_thread._COMMAND_S, main._CHECK_INTERVAL_S = 0.0, 0.2
        worker.engine.post(begun.touch)
        worker.engine.post(lambda: time.sleep(hang_s))
        worker.engine.post(lambda: begun.with_suffix(".ended").touch())
        yield addresses

settings = load_settings(WorkerSettings, "torchrelay-worker")
run_service("worker", settings, serving)
"""


@contextmanager
def running(folder: Path, nats_url: str, hang_s: float, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    options = {
        "worker-id": "w",
        "node-key": derive_node_key(bytes(32), "w").hex(),
        "nats-url": nats_url,
        "kv-pool-bytes": str(32 << 20),
        "engine-stall-s": "0.5",
        **settings,
    }
    args = [part for name, value in options.items() for part in (f"--{name}", value)]
    with (folder / "log").open("wb") as log:
        command = (sys.executable, "-c", PROGRAM, str(folder / "begun"), str(hang_s), *args)
        process = subprocess.Popen(command, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def await_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: path.exists() or process.poll() is not None, f"{path}")
    assert process.poll() is None, "the worker ended"


def test_hung_engine_ends_its_worker_with_a_traceback(tmp_path: Path, nats_url: str) -> None:
    with running(tmp_path, nats_url, hang_s=600) as process:
        assert process.wait(HANG_S) == 1
    log = (tmp_path / "log").read_text()
    assert "the engine has work and has made no step" in log
    assert 'File "<string>"' in log and "most recent call first" in log and "_run_commands" in log


def test_hung_engine_without_a_watchdog_keeps_its_worker(tmp_path: Path, nats_url: str) -> None:
    with running(tmp_path, nats_url, hang_s=3, **{"watchdog-s": "0"}) as process:
        await_file(tmp_path / "begun.ended", process)
        assert process.poll() is None


def test_paused_worker_resumes(tmp_path: Path, nats_url: str) -> None:
    with running(tmp_path, nats_url, hang_s=1, **{"engine-stall-s": "2"}) as process:
        await_file(tmp_path / "begun", process)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3)  # the pause itself, longer than the stall that ends a worker
        os.kill(process.pid, signal.SIGCONT)
        await_file(tmp_path / "begun.ended", process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(10 * LOOK_S)  # more looks than it takes to end a hung worker
