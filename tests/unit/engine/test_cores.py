"""A computation leaves one core to those who bring its weights, and takes it back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchrelay.engine.cores import CoreShare, one_core


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_one_core_is_left_until_the_weights_are_there() -> None:
    share = CoreShare()
    counts = []
    for is_loaded in (False, False, True):
        share.settle(is_loaded)
        counts.append(torch.get_num_threads())
    assert counts == [2, 2, 3]
    share.settle(False)
    share.restore()
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_small_work_takes_one_core_and_gives_the_others_back() -> None:
    with pytest.raises(KeyError), one_core():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 3


def test_the_only_core_is_kept() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    CoreShare().settle(is_loaded=False)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
