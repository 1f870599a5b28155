"""Layers run as their segments arrive, and never before."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.harness import Model, ModelOf, assert_idle, group_of, outputs, prompt_of, run
from torchrelay.engine.core import LoadFailed
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.model.batch import Batch

PROMPT = prompt_of(20)


class Watched:
    """An instance over a pack of 0xFF bytes (NaN in any dtype), with the layers that have run."""

    def __init__(self, model: Model) -> None:
        self.pack = model.pack
        self.data = bytearray(b"\xff" * len(self.pack.data))
        self.instance = Instance(self.pack.manifest, memoryview(self.data).toreadonly(), KvPool(1 << 20))
        self.num_layers = self.instance.config.num_layers
        self.ran: list[int] = []
        inner = self.instance.model.transformer.run_layer

        def run_layer(layer: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
            self.ran.append(layer)
            return inner(layer, hidden, batch)

        self.instance.model.transformer.run_layer = run_layer  # type: ignore[method-assign]

    def deliver(self, segment: int) -> None:
        """Delivers the bytes of a segment."""
        span = self.pack.manifest.segments[segment]
        self.data[span.begin : span.end] = self.pack.data[span.begin : span.end]
        self.instance.segment_ready(segment)


@pytest.mark.parametrize("tied", [False, True])
def test_layer_runs_once_its_segment_arrives(model_of: ModelOf, tied: bool) -> None:
    model = model_of("qwen2", tied)
    watched = Watched(model)
    instance = watched.instance
    instance.prefill(group_of(PROMPT))
    for segment in range(watched.num_layers + 1):
        assert outputs(run(instance)) == {}
        assert watched.ran == list(range(max(0, segment - 1)))
        watched.deliver(segment)
        assert instance.num_segments_ready == segment + 1
    assert outputs(run(instance)) == {}
    watched.deliver(watched.num_layers + 1)
    steps = run(instance)
    assert outputs(steps)["r/0", 0] == model.expected(PROMPT)
    assert steps[0].tokens  # all layers have run before
    assert_idle(instance)


def test_segments_may_arrive_in_any_order(model_of: ModelOf) -> None:
    model = model_of()
    watched = Watched(model)
    watched.instance.prefill(group_of(PROMPT))
    steps = []
    for segment in reversed(range(watched.num_layers + 2)):
        watched.deliver(segment)
        watched.deliver(segment)
        steps += run(watched.instance)
    assert outputs(steps)["r/0", 0] == model.expected(PROMPT)


def test_failed_load_ends_step(model_of: ModelOf) -> None:
    watched = Watched(model_of())
    instance = watched.instance
    instance.prefill(group_of(PROMPT))
    watched.deliver(0)
    watched.deliver(1)
    run(instance)
    assert watched.ran == [0]
    instance.fail("no holder is left")
    with pytest.raises(LoadFailed, match=r"segment 2 .* no holder is left"):
        instance.step()
    instance.check_integrity()  # as if the batch had never begun
    instance.cancel("r/0")
    assert_idle(instance)


def test_loaded_instance_survives_failed_store(model_of: ModelOf) -> None:
    model = model_of()
    instance = model.instance()
    instance.fail("the store went away")
    instance.prefill(group_of(PROMPT))
    assert outputs(run(instance))["r/0", 0] == model.expected(PROMPT)
