"""A whole layer in one call gives what its steps give, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.running import Model, group_of, prompt_of, run
from tests.unit.engine.test_exactness import ModelOf
from torchrelay.engine import fused
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.cpu.kernels import Kernels
from torchrelay.engine.cpu.layer import CpuLayer
from torchrelay.engine.instance import Instance

SAMPLING = SamplingParams(temperature=0, max_tokens=30)


class Counted(CpuLayer):
    num_done = 0

    def run(self, *arguments: object) -> Tensor | None:
        done = super().run(*arguments)  # type: ignore[arg-type]  # the same as its own
        self.num_done += done is not None
        return done


def logits_of(instance: Instance, num_groups: int) -> list[Tensor]:
    """Of every step, with prompts of several lengths that go beyond windows and page ends."""
    found: list[Tensor] = []
    logits = instance._model.decoder.logits

    def spy(hidden: Tensor) -> Tensor:
        found.append(logits(hidden))
        return found[-1]

    instance._model.decoder.logits = spy  # type: ignore[method-assign]
    for number in range(num_groups):
        instance.prefill(group_of(prompt_of(5 + 9 * number, number), f"{number}/0", SAMPLING))
    run(instance)
    return found


def instances(
    monkeypatch: pytest.MonkeyPatch, model: Model, built: Kernels, dtype: torch.dtype
) -> tuple[Instance, Instance, Counted]:
    """One that computes step by step, and one that computes whole layers; both with the same kernels."""
    for module in ("attention", "fused", "linear", "cpu.attention"):
        monkeypatch.setattr(f"torchrelay.engine.{module}.kernels", lambda: built)
    monkeypatch.setattr(fused, "whole_layer_for", lambda *of: None)
    plain = model.instance(token_budget=40)
    whole = model.instance(token_budget=40)
    counted = Counted(built, whole.config, dtype)
    whole._model.decoder._whole = counted
    return plain, whole, counted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_its_steps(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, family: str, dtype: str
) -> None:
    """A mixture of experts is left to the steps, and so is whatever computes several rows of a sequence."""
    model = model_of(family, dtype=dtype)
    plain, whole, counted = instances(monkeypatch, model, built, getattr(torch, dtype))
    expected, found = logits_of(plain, 7), logits_of(whole, 7)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if whole.config.experts is None:
        assert counted.num_done >= 25 * whole.config.num_layers
    else:
        assert counted.num_done == 0


def test_fp32_is_left_to_the_steps(monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels) -> None:
    _, whole, counted = instances(monkeypatch, model_of(), built, torch.float32)
    assert logits_of(whole, 2)
    assert counted.num_done == 0


def test_more_rows_than_the_kernels_are_quickest_for(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels
) -> None:
    """Are left to the steps; as many as that are not."""
    model = model_of(dtype="bfloat16")
    _, whole, counted = instances(monkeypatch, model, built, torch.bfloat16)
    counted._most_rows = 3
    logits_of(whole, 3)
    before = counted.num_done
    assert before > 0
    logits_of(whole, 4)
    assert counted.num_done - before < before
