"""Instances that compute whole layers in one call, counted, and what they give."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.unit.engine.harness import Model, group_of, prompt_of, run
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.execution.resident_model import ResidentModel
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels import fused_ops
from torchrelay.engine.kernels.cpu import threads
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.layers import CpuLayers
from torchrelay.engine.kernels.cpu.library import Kernels

SAMPLING = SamplingParams(temperature=0, max_tokens=30)


class Counted(CpuLayers):
    """``calls``: how many layers each has computed; ``rows``: of how many rows."""

    def __init__(self, kernels: Kernels, model: ResidentModel, active_processes: ActiveProcesses | None = None) -> None:
        kinds = model.decoder._kind_of_layer
        super().__init__(kernels, model.config, model.weights.dtype, kinds, active_processes)
        self.calls: list[int] = []
        self.rows: list[int] = []

    def run(self, *arguments: object) -> tuple[Tensor, int]:
        hidden, num_layers = super().run(*arguments)  # type: ignore[arg-type]  # the same as its own
        self.calls.append(num_layers)
        self.rows.append(len(hidden))
        return hidden, num_layers


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
    instance._model.decoder.logits = logits  # type: ignore[method-assign]
    return found


def instances(monkeypatch: pytest.MonkeyPatch, model: Model, built: Kernels) -> tuple[Instance, Instance, Counted]:
    """One that computes step by step, and one that computes whole layers; both with the same kernels."""
    for module in ("attention", "fused_ops", "linear", "cpu.attention"):
        monkeypatch.setattr(f"torchrelay.engine.kernels.{module}.kernels", lambda: built)
    monkeypatch.setattr(threads, "MAX_ONE_THREAD_BYTES", 0)
    # A CPU that has arithmetic of the dtype leaves all but a few rows to torch.
    monkeypatch.setattr("torchrelay.engine.kernels.linear.has_arithmetic", lambda dtype: False)
    monkeypatch.setattr(fused_ops, "whole_layers_for", lambda *of: None)
    plain = model.instance(token_budget=40, prefix_cache=False)
    whole = model.instance(token_budget=40, prefix_cache=False)
    counted = Counted(built, whole._model)
    whole._model.decoder._whole_layers = counted
    return plain, whole, counted
