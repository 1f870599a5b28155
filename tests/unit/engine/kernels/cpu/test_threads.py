"""The number of threads of a computation, and the file through which processes count each other."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.harness import Clock
from torchrelay.engine.kernels.cpu.active_processes import ACTIVE_FOR_S, ActiveProcesses
from torchrelay.engine.kernels.cpu.threads import MAX_ONE_THREAD_BYTES, ThreadBudget, one_thread


@pytest.mark.usefixtures("three_threads")
def test_loading_leaves_one_core() -> None:
    share = ThreadBudget(MAX_ONE_THREAD_BYTES)
    counts = []
    for is_loaded in (False, False, True):
        share.adjust(is_loaded)
        counts.append(torch.get_num_threads())
    assert counts == [2, 2, 3]
    share.adjust(False)
    share.restore()
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_cores_are_divided_between_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    mine, theirs, third = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(3))
    share = ThreadBudget(MAX_ONE_THREAD_BYTES, mine)
    counts = []
    for act in (share.rest, theirs.count_computing, third.count_computing, theirs.rest):
        act()
        share.adjust(is_loaded=True)
        counts.append(torch.get_num_threads())
    assert counts == [3, 3, 2, 3]
    share.restore()
    assert theirs.count_computing() == 2, "restore also rests"


@pytest.mark.usefixtures("three_threads")
def test_small_work_uses_one_thread_and_restores_others() -> None:
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_small_model_gets_one_thread() -> None:
    share = ThreadBudget(MAX_ONE_THREAD_BYTES - 1)
    for is_loaded in (False, True):
        share.adjust(is_loaded)
        assert torch.get_num_threads() == 1
    share.restore()
    assert torch.get_num_threads() == 3


def test_single_thread_is_kept_while_loading() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    ThreadBudget(MAX_ONE_THREAD_BYTES).adjust(is_loaded=False)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


_COMPUTE = """
import sys
from pathlib import Path
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
processes = ActiveProcesses(Path(sys.argv[1]), lambda: 100.0, max_processes=2)
print(processes.count_computing(), flush=True)
sys.stdin.read()
"""


def test_computing_process_counts_until_it_rests(tmp_path: Path) -> None:
    first, second = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(2))
    assert first.count_computing() == 1
    assert second.count_computing() == 2
    first.rest()
    assert second.count_computing() == 1


def test_start_or_rest_notifies_other_processes(tmp_path: Path) -> None:
    mine, theirs = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(2))
    number = ctypes.c_int64.from_address(mine.change_address)
    seen = []
    for act in (mine.count_computing, theirs.count_computing, theirs.count_computing, theirs.rest, theirs.rest):
        mine.count_computing()
        act()
        seen.append(number.value != mine.change_seen)
    assert seen == [False, True, False, True, False], "own changes are known, and only changes notify"


def test_simultaneous_notifications_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process notifies the others of its start, another process starts, is counted, and rests."""
    mine, theirs, slow = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(3))
    number = ctypes.c_int64.from_address(mine.change_address)

    class Slow:
        def __init__(self, change: Any) -> None:
            self._change = change

        def __getitem__(self, index: int) -> int:
            return int(self._change[index])

        def __setitem__(self, index: int, value: int) -> None:
            theirs.count_computing()
            mine.count_computing()
            theirs.rest()
            self._change[index] = value

    mine.count_computing()
    monkeypatch.setattr(slow, "_change", Slow(slow._change))
    slow.count_computing()
    assert number.value != mine.change_seen, "mine must count again: theirs rests"


def test_silent_process_expires(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (ActiveProcesses(tmp_path / "cores", clock) for _ in range(2))
    first.count_computing()
    clock.now_s += 0.9 * ACTIVE_FOR_S
    assert second.count_computing() == 2
    clock.now_s += 0.2 * ACTIVE_FOR_S
    assert second.count_computing() == 1


def test_entry_of_earlier_boot_does_not_count(tmp_path: Path) -> None:
    """The file survives a boot, the clock starts again, and a pid may belong to another process."""
    clock = Clock()
    before = ActiveProcesses(tmp_path / "cores", clock)
    assert before.count_computing() == 1
    clock.now_s = 5.0
    assert ActiveProcesses(tmp_path / "cores", clock).count_computing() == 1


def test_killed_process_frees_its_entry(tmp_path: Path) -> None:
    """Once killed it expires, and the next process takes its entry."""
    path = tmp_path / "cores"
    mine = ActiveProcesses(path, Clock(), max_processes=2)
    assert mine.count_computing() == 1
    program = [sys.executable, "-c", _COMPUTE, str(path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "2\n"
        assert mine.count_computing() == 2
        with pytest.raises(OSError, match="is full: 2 processes"):
            ActiveProcesses(path, Clock(), max_processes=2)
        other.kill()
    ActiveProcesses(path, Clock(), max_processes=2)
    assert mine.count_computing() == 1
