"""A worker whose engine hangs is unhealthy and ends itself; a worker that only rests or was paused does neither."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.integration.roles_testbed import running_test_worker
from tests.support.wait import HANG_S
from tests.unit.param_store.running_store import running_store
from torchrelay.common.identity.keys import derive_node_key
from torchrelay.common.liveness import Liveness
from torchrelay.common.net.probes import GrpcProbe
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.worker import main
from torchrelay.worker.main import watched_engine
from torchrelay.worker.worker import Worker

# A worker whose first command hangs; like a step of a known length, the command is expected to take no time.
PROGRAM = """
import time
from contextlib import asynccontextmanager
from torchrelay.common.process.service import run_service
from torchrelay.common.process.settings import load_settings
from torchrelay.worker import main
from torchrelay.worker.main import running_worker, watched_engine
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot import engine_thread

@asynccontextmanager
async def serving():
    async with running_worker(settings) as (worker, addresses), watched_engine(worker):
        engine_thread._COMMAND_S, main._CHECK_INTERVAL_S = 0.0, 0.05
        worker.engine.post(lambda: time.sleep(600))
        yield addresses

settings = load_settings(WorkerSettings, "torchrelay-worker")
run_service("worker", settings, serving)
"""


def test_hung_engine_ends_its_worker_with_a_traceback(nats_url: str) -> None:
    options = {
        "worker-id": "w",
        "node-key": derive_node_key(bytes(32), "w").hex(),
        "nats-url": nats_url,
        "kv-pool-bytes": str(1 << 20),
        "engine-stall-s": "0.2",
    }
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        *(part for name, value in options.items() for part in (f"--{name}", value)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 1
    assert "the engine has work and has made no step" in ended.stderr
    assert 'File "<string>"' in ended.stderr and "most recent call first" in ended.stderr
    assert "_run_commands" in ended.stderr


@pytest.mark.parametrize(
    ("faults", "watchdog_s", "ends_at"),
    [
        (["hangs"] * main._MAX_FAULTS, 1.0, [main._MAX_FAULTS]),
        ([*["hangs"] * (main._MAX_FAULTS - 1), ""] * 2, 1.0, []),  # at the first looks after a pause of the process
        (["hangs"] * 2 * main._MAX_FAULTS, 0.0, []),
    ],
    ids=["hangs", "paused", "without a watchdog"],
)
async def test_worker_ends_after_several_faults_in_a_row(
    monkeypatch: pytest.MonkeyPatch, faults: list[str], watchdog_s: float, ends_at: list[int]
) -> None:
    ended_at: list[int] = []
    num_looks, has_seen_all = 0, asyncio.Event()

    async def fault() -> str:
        nonlocal num_looks
        if num_looks == len(faults):
            has_seen_all.set()
            await asyncio.Event().wait()
        num_looks += 1
        return faults[num_looks - 1]

    monkeypatch.setattr(main, "_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(main, "end_process", lambda: ended_at.append(num_looks))
    worker: Any = SimpleNamespace(settings=SimpleNamespace(watchdog_s=watchdog_s), fault=fault)
    async with watched_engine(cast(Worker, worker)):
        if watchdog_s:
            await has_seen_all.wait()
        await asyncio.sleep(0)
    assert ended_at == ends_at and bool(num_looks) == bool(watchdog_s)


async def test_hung_engine_is_unhealthy_until_it_resumes(tmp_path: Path, nats_url: str) -> None:
    async with (
        running_store(tmp_path) as store,
        running_test_worker(nats_url, store) as worker,
        open_channel(worker.address) as channel,
    ):
        probe, engine = GrpcProbe(channel), worker.worker.engine
        assert await probe.ask() == ""
        has_begun, may_end = threading.Event(), threading.Event()
        engine.post(has_begun.set)
        engine.post(may_end.wait)
        try:
            assert await asyncio.to_thread(has_begun.wait, HANG_S)
            assert await probe.ask() == ""
            # As if it had been so, and somebody had looked, an hour ago.
            an_hour_ago = time.monotonic() - 3600
            worker.worker.liveness = Liveness(an_hour_ago)
            worker.worker.liveness.observe(engine.progress(None), an_hour_ago)
            fault = await probe.ask()
            assert fault.startswith("cannot serve: the engine has work and has made no step for 36"), fault
        finally:
            may_end.set()
        await engine.call(lambda: None)
        assert await probe.ask() == ""
