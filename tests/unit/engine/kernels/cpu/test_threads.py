"""The number of threads of a computation, and the file through which processes count each other."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.harness import Clock
from torchrelay.engine.kernels.cpu.active_processes import ACTIVE_FOR_S, ActiveProcesses, fair_share
from torchrelay.engine.kernels.cpu.threads import MAX_ONE_THREAD_BYTES, ThreadBudget, one_thread


def count(processes: ActiveProcesses) -> int:
    """Marks the process as computing without a limit; returns how many share the cores."""
    return 60 // processes.take_share(60, 60)


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
    for act in (share.rest, partial(count, theirs), partial(count, third), theirs.rest):
        act()
        share.adjust(is_loaded=True)
        counts.append(torch.get_num_threads())
    assert counts == [3, 3, 2, 3]
    share.restore()
    assert count(theirs) == 2, "restore also rests"


@pytest.mark.usefixtures("three_threads")
def test_limited_model_leaves_its_other_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
    mine, theirs = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(2))
    limited = ThreadBudget(MAX_ONE_THREAD_BYTES, mine, max_threads=1)
    unlimited = ThreadBudget(MAX_ONE_THREAD_BYTES, theirs)
    for is_loaded in (False, True):
        limited.adjust(is_loaded)
        assert torch.get_num_threads() == 1
    unlimited.adjust(is_loaded=True)
    assert torch.get_num_threads() == 3, "not two, its equal share of the four"
    assert mine.take_share(4, 1) == 1


def test_more_threads_than_the_process_has_are_no_limit() -> None:
    before = torch.get_num_threads()
    ThreadBudget(MAX_ONE_THREAD_BYTES, max_threads=4096).adjust(is_loaded=True)
    assert torch.get_num_threads() == before


@given(num_cores=st.integers(1, 64), of_all=st.lists(st.integers(1, 64), min_size=1, max_size=20))
def test_fair_share_uses_all_cores_and_favours_none(num_cores: int, of_all: list[int]) -> None:
    shares = [fair_share(num_cores, most, of_all) for most in of_all]
    assert all(1 <= share <= most for share, most in zip(shares, of_all, strict=True))
    if num_cores >= len(of_all):
        assert sum(shares) <= num_cores
        num_short = sum(share < most for share, most in zip(shares, of_all, strict=True))
        assert sum(shares) == sum(of_all) or num_cores - sum(shares) < num_short, "only a remainder is left"
    least = min((share for share, most in zip(shares, of_all, strict=True) if share < most), default=0)
    assert not least or max(shares) <= least, "who gets less than it takes gets as much as any"


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
print(60 // processes.take_share(60, 60), flush=True)
sys.stdin.read()
"""


def test_computing_process_counts_until_it_rests(tmp_path: Path) -> None:
    first, second = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(2))
    assert count(first) == 1
    assert count(second) == 2
    first.rest()
    assert count(second) == 1


def test_start_or_rest_notifies_other_processes(tmp_path: Path) -> None:
    mine, theirs = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(2))
    number = ctypes.c_int64.from_address(mine.change_address)
    seen = []
    for act in (partial(count, mine), partial(count, theirs), partial(count, theirs), theirs.rest, theirs.rest):
        count(mine)
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
            count(theirs)
            count(mine)
            theirs.rest()
            self._change[index] = value

    count(mine)
    monkeypatch.setattr(slow, "_change", Slow(slow._change))
    count(slow)
    assert number.value != mine.change_seen, "mine must count again: theirs rests"


def test_silent_process_expires(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (ActiveProcesses(tmp_path / "cores", clock) for _ in range(2))
    count(first)
    clock.now_s += 0.9 * ACTIVE_FOR_S
    assert count(second) == 2
    clock.now_s += 0.2 * ACTIVE_FOR_S
    assert count(second) == 1


def test_entry_of_earlier_boot_does_not_count(tmp_path: Path) -> None:
    """The file survives a boot, the clock starts again, and a pid may belong to another process."""
    clock = Clock()
    before = ActiveProcesses(tmp_path / "cores", clock)
    assert count(before) == 1
    clock.now_s = 5.0
    assert count(ActiveProcesses(tmp_path / "cores", clock)) == 1


def test_killed_process_frees_its_entry(tmp_path: Path) -> None:
    """Once killed it expires, and the next process takes its entry."""
    path = tmp_path / "cores"
    mine = ActiveProcesses(path, Clock(), max_processes=2)
    assert count(mine) == 1
    program = [sys.executable, "-c", _COMPUTE, str(path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "2\n"
        assert count(mine) == 2
        with pytest.raises(OSError, match="is full: 2 processes"):
            ActiveProcesses(path, Clock(), max_processes=2)
        other.kill()
    ActiveProcesses(path, Clock(), max_processes=2)
    assert count(mine) == 1
