"""The number of threads of a computation while weights arrive and other processes compute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
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
    mine, theirs = (ActiveProcesses(tmp_path / "cores") for _ in range(2))
    share = ThreadBudget(MAX_ONE_THREAD_BYTES, mine)
    counts = []
    for act in (share.rest, theirs.count_computing, ActiveProcesses(tmp_path / "cores").count_computing, theirs.rest):
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
