from __future__ import annotations

from threading import Thread

import torch

from torchrelay.engine.kernels.workspace import Workspace


def test_workspace_is_reused_and_grows() -> None:
    scratch = Workspace()
    first = scratch.of(8)
    assert first.shape == (8,)
    assert scratch.of(5).data_ptr() == first.data_ptr()
    assert scratch.of(9).shape == (9,)


def test_each_thread_has_its_own_workspace() -> None:
    scratch = Workspace()
    places = [scratch.of(8).data_ptr()]
    other = Thread(target=lambda: places.append(scratch.of(8).data_ptr()))
    other.start()
    other.join()
    assert places[0] != places[1]


def test_workspace_made_in_inference_mode_is_writable() -> None:
    scratch = Workspace()
    with torch.inference_mode():
        scratch.of(4)
    assert float(scratch.of(4).fill_(1.0).sum()) == 4.0
