"""A computation leaves one core to those who bring its weights, and takes it back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.threads import MAX_ONE_THREAD_BYTES, ThreadBudget, one_thread


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_one_core_is_left_until_the_weights_are_there() -> None:
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
def test_cores_are_divided_while_others_compute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert theirs.count_computing() == 2, "who has restored all threads computes no more"


@pytest.mark.usefixtures("three_threads")
def test_small_work_takes_one_core_and_gives_the_others_back() -> None:
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_small_model_gets_one_core_and_leaves_the_others_to_the_next() -> None:
    share = ThreadBudget(MAX_ONE_THREAD_BYTES - 1)
    for is_loaded in (False, True):
        share.adjust(is_loaded)
        assert torch.get_num_threads() == 1
    share.restore()
    assert torch.get_num_threads() == 3


def test_the_only_core_is_kept() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    ThreadBudget(MAX_ONE_THREAD_BYTES).adjust(is_loaded=False)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
