"""An interrupted run of the tests leaves no process, no shared memory and no network namespace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.lab.reaper import pids_in
from tests.support.guard import living_processes, shared_memory_of
from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
TEST = """
import os
from pathlib import Path

from tests.lab.network import Lab
from tests.support.guard import RUN, shared_memory_path
from tests.support.platform import running_platform

FOLDER = Path(__file__).parent
SMALL = ("--workers", "0..1", "--arena-mb", "64")

def test_waiting(redis_url):
    shared_memory_path("arena").touch()
    with Lab(["h1"]) as lab, running_platform(FOLDER / "home", SMALL):
        lab["h1"].spawn(["sleep", "300"])
        draft = FOLDER / "draft"
        draft.write_text(" ".join((os.environ[RUN], *lab.namespaces)))
        draft.replace(FOLDER / "waiting")
        lab["h1"].run(["sleep", "300"], timeout_s=300)
"""


def servers_in(folder: Path) -> list[str]:
    """Processes that run in the folder, as Redis does, whose environment cannot be read."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended
            if path.readlink().is_relative_to(folder):
                pids.append(path.parent.name)
    return pids


@pytest.mark.lab
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_interrupted_run_leaves_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "test_waiting.py").write_text(TEST)
    waiting = tmp_path / "waiting"
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-n", "2"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *command,
                "--rootdir",
                str(ROOT),
                "--basetemp",
                str(tmp_path / "inner"),
                str(tmp_path / "test_waiting.py"),
            ],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(waiting.exists, "the start of the platform and the lab")
        run, *namespaces = waiting.read_text().split()
        assert living_processes(run) and servers_in(tmp_path) and shared_memory_of(run) and pids_in(namespaces)
        if name == "SIGINT":  # Ctrl-C reaches all processes of the terminal's group
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.Signals[name])
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
    wait_until(lambda: not living_processes(run) and not servers_in(tmp_path), "the end of all processes")
    wait_until(lambda: not shared_memory_of(run), "the release of the shared memory")
    assert not pids_in(namespaces)
    assert not [name for name in namespaces if (Path("/run/netns") / name).exists()]
    assert not (tmp_path / "home" / "run" / "up.json").exists()
