"""Runs torch with one thread: these models are tiny, and other tests run at the same time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.unit.engine.harness import Model

# Triton exists for Linux only.
collect_ignore = [] if sys.platform == "linux" else ["kernels/triton", "execution/test_decode_graphs.py"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Checkpoint, pack and reference by family and options; made once per session."""
    made: dict[tuple[object, ...], Model] = {}

    def make(family: str = "llama", tied: bool = False, dtype: str = "float32", **config: Any) -> Model:
        key = (family, tied, dtype, *config.items())
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(family)
            made[key] = Model(make_checkpoint(folder, family, tied=tied, dtype=dtype, **config))
        return made[key]

    return make
