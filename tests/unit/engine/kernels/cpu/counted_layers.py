"""Instances that compute whole layers in one call, counted, and their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.harness import Model, group_of, prompt_of, run
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels import linear, low_rank
from torchrelay.engine.kernels.backends import Backends
from torchrelay.engine.kernels.cpu import linear as cpu_linear
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.attention import CpuAttention
from torchrelay.engine.kernels.cpu.layers import CpuLayers
from torchrelay.engine.kernels.cpu.library import Kernels
from torchrelay.engine.kernels.cpu.ops import CpuOps
from torchrelay.engine.kernels.cpu.threads import ThreadBudget

SAMPLING = SamplingParams(temperature=0, max_tokens=30)


class Counted(CpuLayers):
    """Records the number of layers (``calls``) and of rows (``rows``) of each call."""

    def __init__(self, *arguments: Any, **limits: Any) -> None:
        super().__init__(*arguments, **limits)
        self.calls: list[int] = []
        self.rows: list[int] = []

    def run(self, *arguments: object) -> tuple[Tensor, int]:
        hidden, num_layers = super().run(*arguments)  # type: ignore[arg-type]  # the same as its own
        self.calls.append(num_layers)
        self.rows.append(len(hidden))
        return hidden, num_layers


def logits_of(instance: Instance, num_groups: int, adapters: Sequence[Path] = ()) -> list[Tensor]:
    """The logits of every step, with prompts of several lengths that exceed windows and pages. The first groups have an
    adapter each.
    """
    actual: list[Tensor] = []
    logits = instance.model.transformer.logits

    def spy(hidden: Tensor) -> Tensor:
        actual.append(logits(hidden))
        return actual[-1]

    instance.model.transformer.logits = spy  # type: ignore[method-assign]
    for number in range(num_groups):
        group = group_of(prompt_of(5 + 9 * number, number), f"{number}/0", SAMPLING)
        for folder in adapters[number : number + 1]:
            files = [(folder / f"adapter_{name}").read_bytes() for name in ("config.json", "model.safetensors")]
            group = replace(group, adapter=instance.adapter_reader(folder.name, files[0], files[1]).read())
        instance.prefill(group)
    run(instance)
    instance.model.transformer.logits = logits  # type: ignore[method-assign]
    return actual


def assert_same_logits(plain: Instance, whole: Instance, num_groups: int, adapters: Sequence[Path] = ()) -> None:
    """Checks that both instances compute the same bits."""
    expected, actual = logits_of(plain, num_groups, adapters), logits_of(whole, num_groups, adapters)
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))


def instances(
    monkeypatch: pytest.MonkeyPatch,
    built: Kernels,
    model: Model,
    *,
    layers: Callable[..., int] | None = None,
    max_products: int = 4096,
    processes: ActiveProcesses | None = None,
    limits: dict[str, int] | None = None,
    **settings: Any,
) -> tuple[Instance, Instance, Counted]:
    """An instance that runs single operations and one that runs whole layers, both with the same kernels.

    ``layers`` replaces the kernel of whole layers; ``processes`` and ``limits`` are passed to ``CpuLayers``.
    """
    for module in linear, low_rank:
        monkeypatch.setattr(module, "kernels", lambda: built)
    # On a CPU with arithmetic of the dtype torch computes all but a few rows.
    for module in linear, cpu_linear:
        monkeypatch.setattr(module, "has_arithmetic", lambda dtype: False)
    kernels = SimpleNamespace(level=built.level, layers=layers or built.layers)
    counted: list[Counted] = []

    def whole_layers(*arguments: Any) -> CpuLayers:
        counted.append(Counted(kernels, *arguments, **(limits or {})))
        return counted[0]

    attention = partial(CpuAttention, library=built, max_products=max_products)
    backends = Backends(attention, CpuOps(built))
    settings = {"token_budget": 40, "prefix_cache": False} | settings
    plain = model.instance(backends=backends, threads=budget(), **settings)
    backends = replace(backends, whole_layers=whole_layers)
    whole = model.instance(backends=backends, threads=budget(processes), active_processes=processes, **settings)
    return plain, whole, counted[0]


def budget(processes: ActiveProcesses | None = None) -> ThreadBudget:
    """The budget of a model that is large enough for several threads."""
    return ThreadBudget(0, processes, one_thread_bytes=0)
