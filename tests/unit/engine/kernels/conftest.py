"""Every kernel library that this CPU can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchrelay.engine.kernels.cpu.library import LEVELS, IsaLevel, Kernels


@pytest.fixture(params=[level for level in LEVELS if level.runs_here], ids=lambda level: str(level.name))
def built(request: pytest.FixtureRequest) -> Kernels:
    level: IsaLevel = request.param
    return Kernels(level)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
