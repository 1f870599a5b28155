"""Kernels are built, and used where they can run; without them the engine computes the same."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.harness import ModelOf, assert_batch_is_exact
from tests.unit.engine.test_exactness import LENGTHS
from torchrelay.engine.kernels import backends, linear
from torchrelay.engine.kernels.backends import backends_for, default_attention
from torchrelay.engine.kernels.cpu import attention
from torchrelay.engine.kernels.cpu import library as module
from torchrelay.engine.kernels.cpu.attention import CpuAttention
from torchrelay.engine.kernels.cpu.library import LEVELS, kernels
from torchrelay.engine.kernels.gather_attention import GatherAttention
from torchrelay.engine.model.decoder import Decoder

CPU = torch.device("cpu")


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("gcc") is None,
    reason="for x86-64 under Linux, where there is gcc",
)
def test_quickest_built_library_is_used() -> None:
    assert all(level.file.exists() for level in LEVELS)
    capabilities = torch.cpu.get_capabilities()
    runnable = [level for level in LEVELS if all(capabilities.get(name) for name in level.needs)]
    actual = kernels()
    assert (actual and actual.level) == (runnable[0] if runnable else None)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hides the kernels, as on a machine without a compiler."""
    nowhere = tuple(replace(level, name="none") for level in LEVELS)
    monkeypatch.setattr(module, "LEVELS", nowhere)
    kernels.cache_clear()
    for user in (attention, backends, linear):
        assert user.kernels is kernels
    yield
    kernels.cache_clear()


@pytest.mark.usefixtures("without_kernels")
def test_missing_kernels_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert kernels() is None and backends_for(CPU).fused_ops is None and default_attention(CPU) == "gather"
    assert "no kernels were built" in caplog.text


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_without_kernels_is_exact(model_of: ModelOf, family: str) -> None:
    model = model_of(family)
    instance = model.instance(token_budget=20)
    assert isinstance(instance.model.backend, GatherAttention)
    assert_batch_is_exact(model, instance, LENGTHS)


def test_engine_uses_built_kernels(model_of: ModelOf, built: module.Kernels) -> None:
    instance = model_of().instance()
    assert isinstance(instance.model.backend, CpuAttention)
    assert isinstance(instance.model.transformer, Decoder) and instance.model.transformer.fused_ops is not None
