"""Every library of kernels that this CPU can run."""

from __future__ import annotations

import pytest

from torchrelay.engine.cpu.kernels import LEVELS, Kernels, Level


@pytest.fixture(params=[level for level in LEVELS if level.runs_here], ids=lambda level: str(level.name))
def built(request: pytest.FixtureRequest) -> Kernels:
    level: Level = request.param
    return Kernels(level)
