"""A lab leaves nothing behind however it ends, and says what is missing when it cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lab import Lab, LabError
from tests.lab.reaper import pids_in
from tests.support.wait import HANG_S

pytestmark = pytest.mark.lab

_REPOSITORY = Path(__file__).parents[2]
# Prints the namespace, starts a process that starts another in a session of its own, and waits to be killed.
_OWNER = """
import sys
from tests.lab import Lab
with Lab(["h1"]) as lab:
    lab["h1"].spawn(["sh", "-c", "setsid sleep 300 & echo ready; wait"])
    print(*lab.namespaces, flush=True)
    sys.stdin.read()
"""


def remaining(namespaces: Sequence[str]) -> list[str]:
    """The ``namespaces`` that `ip` still knows."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    known = {line.split()[0] for line in listed.splitlines()}
    return [name for name in namespaces if name in known]


def machine_links() -> set[str]:
    """The interfaces outside all labs."""
    return {entry.name for entry in Path("/sys/class/net").iterdir()}


def test_processes_run_on_their_host_and_end_with_the_lab() -> None:
    links = machine_links()
    with Lab(["h1", "h2"], rate_mbit=100) as lab:
        assert remaining(lab.namespaces) == list(lab.namespaces)
        assert machine_links() == links
        script = ["sh", "-c", "echo $MARK; setsid sleep 300 & wait"]
        process = lab["h1"].spawn(script, env={"MARK": "started"}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline() == b"started\n"
        assert process.pid in pids_in([lab["h1"].namespace])
        assert pids_in([lab["h2"].namespace]) == []
        ended = lab["h1"].spawn(["sleep", "300"])
        os.kill(ended.pid, signal.SIGTERM)
        assert ended.wait(timeout=HANG_S) == -signal.SIGTERM
        assert lab["h1"].address in lab["h1"].run(["ip", "address", "show"]).stdout
        with pytest.raises(LabError, match=r"on h1.*status 3: oh"):
            lab["h1"].run(["sh", "-c", "echo oh >&2; exit 3"])
    assert process.returncode == -signal.SIGKILL
    assert remaining(lab.namespaces) == []
    assert pids_in(lab.namespaces) == []
    assert machine_links() == links


def test_failure_in_a_lab_or_at_its_start_leaves_nothing() -> None:
    with pytest.raises(KeyError), Lab(["h1"]) as lab:
        process = lab["h1"].spawn(["sleep", "300"])
        lab["no-such-host"]
    assert process.returncode == -signal.SIGKILL
    assert remaining(lab.namespaces) == []
    lab = Lab(["h1", "h2"], rate_mbit=-1)
    with pytest.raises(ValueError, match="above 0"), lab:
        pass
    assert remaining(lab.namespaces) == []


def test_killed_owner_of_a_lab_leaves_nothing() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    with owner, owner.stdout as output:
        namespaces: list[str] = []
        while "ready" not in namespaces or len(namespaces) < 3:  # two processes write, in any order
            namespaces += output.readline().split()
        namespaces.remove("ready")
        owner.kill()
        assert output.read() == ""  # the lab's processes and its reaper hold it open until they have ended
    assert remaining(namespaces) == []


def test_lab_without_root_or_iproute_names_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(LabError, match="run it as root"), Lab(["h1"]):
            pass
    finally:
        os.seteuid(0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=r"ip and tc and bridge.*apt-get install iproute2"), Lab(["h1"]):
        pass


@pytest.mark.parametrize("hosts", [[], ["h1", "h1"], ["H1"], ["-h"], ["a/b"], ["switch ns"]])
def test_host_names_are_checked(hosts: list[str]) -> None:
    with pytest.raises(ValueError, match="host"):
        Lab(hosts)
