"""The life of a service process: a signal ends it in order when it serves, and at once while it starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from contextlib import asynccontextmanager
from pathlib import Path
from torchrelay.common.process.service import run_service
from torchrelay.common.process.settings import ServiceSettings

folder = Path(sys.argv[1])

@asynccontextmanager
async def serving():
    try:
        (folder / "begun").touch()
        if sys.argv[2] == "stuck":
            await asyncio.Event().wait()
        yield {"grpc": "127.0.0.1:1"}
        (folder / "ended").touch()
    finally:
        (folder / "cleaned").touch()

run_service("test", ServiceSettings(ready_file=folder / "ready.json"), serving)
"""


def run(folder: Path, kind: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), kind], stderr=subprocess.DEVNULL)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_that_serves_ends_in_order(tmp_path: Path, number: signal.Signals) -> None:
    process = run(tmp_path, "serves")
    await_file(tmp_path / "ready.json")
    told = json.loads((tmp_path / "ready.json").read_text())
    assert told == {"grpc": "127.0.0.1:1", "pid": process.pid}
    process.send_signal(number)
    assert process.wait(20) == 0
    assert (tmp_path / "ended").exists() and not (tmp_path / "ready.json").exists()


def test_a_service_that_waits_at_its_start_ends_at_once(tmp_path: Path) -> None:
    process = run(tmp_path, "stuck")
    await_file(tmp_path / "begun")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert (tmp_path / "cleaned").exists() and not (tmp_path / "ended").exists()
