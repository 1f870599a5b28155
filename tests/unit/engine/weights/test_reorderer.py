"""Reordered weights give the same results, and replace the originals while the instance serves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.unit.engine.harness import Model, assert_idle, group_of, last_logits, outputs, prompt_of, run
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.linear import linear
from torchrelay.engine.weights import reorderer
from torchrelay.engine.weights.reorderer import (
    OneDnnMatrix,
    Reorderer,
    available_bytes,
    reordered,
    reordered_layer,
)

ModelOf = Callable[..., Model]


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """This process's number of threads stays as it is."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# As on a CPU with bf16 arithmetic; others emulate it, with the same results. The thread starts at once.
at_once = partial(Reorderer, delay_s=0.0, gains=lambda dtype: dtype != torch.float32)


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_the_same(rows: int, with_bias: bool) -> None:
    weight = torch.randn(72, 48).bfloat16()
    x, bias = torch.randn(rows, 48).bfloat16(), torch.randn(72).bfloat16() if with_bias else None
    found = linear(x, OneDnnMatrix(weight), bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), exact, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_stay_where_a_copy_is_no_quicker(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(reorderer, "has_arithmetic", lambda asked: asked == torch.float32)
    weight = torch.randn(8, 8).to(dtype)
    assert reordered(weight) is weight


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3-moe"])
def test_bf16_logits_stay_within_the_tolerance(model_of: ModelOf, family: str) -> None:
    """The tolerance of `test_exactness.py`."""
    model, prompt = model_of(family, dtype="bfloat16"), prompt_of(40)
    instance = _reordered_instance(model)
    assert isinstance(instance.model.weights.layer(0).qkv, OneDnnMatrix)
    tolerance = 0.3 if instance.config.experts is not None else 0.15
    assert float((last_logits(instance, prompt) - model.logits(prompt)).abs().max()) < tolerance
    instance.close()


def test_fp32_greedy_output_is_the_same(model_of: ModelOf) -> None:
    model = model_of("qwen3")
    instance = _reordered_instance(model)
    instance.prefill(group_of(prompt_of(17)))
    assert outputs(run(instance)) == {("r/0", 0): model.expected(prompt_of(17))}
    assert_idle(instance)


def test_layers_are_swapped_under_a_running_request(model_of: ModelOf) -> None:
    """Between any two steps: each token is the most likely one for transformers, or nearly."""
    model = model_of("llama", dtype="bfloat16")
    instance = model.instance()
    instance.prefill(group_of(prompt_of(17)))
    steps = [instance.step()]
    for layer in range(instance.config.num_layers):
        steps.append(instance.step())
        instance.model.weights.replace_layer(
            layer, reordered_layer(instance.model.weights.layer(layer), lambda dtype: True)
        )
        assert isinstance(instance.model.weights.layer(layer).qkv, OneDnnMatrix)
    steps += run(instance)
    output = outputs(steps)["r/0", 0]
    assert len(output) == 24
    for position, token in enumerate(output):
        logits = model.logits((*prompt_of(17), *output[:position]))
        assert float(logits.max() - logits[token]) < 0.15
    assert_idle(instance)


def test_closing_ends_the_thread_wherever_it_is(model_of: ModelOf) -> None:
    model = model_of("llama", dtype="bfloat16")
    for loaded in (False, True):
        instance = model.instance(loaded=loaded, cpu_reorder=True, reorderer=at_once)
        swapping = instance.model.reorderer
        assert swapping is not None
        instance.close()
        assert not swapping.is_running
        swapping.start()  # the last segment came too late
        assert not swapping.is_running


@pytest.mark.parametrize(("available", "is_done"), [(1.9, False), (2.1, True)])
def test_weights_are_copied_only_where_there_is_room(model_of: ModelOf, available: float, is_done: bool) -> None:
    model = model_of("llama", dtype="bfloat16")
    num_bytes = available * model.pack.manifest.num_bytes
    instance = model.instance(cpu_reorder=True, reorderer=partial(at_once, available_bytes=lambda: num_bytes))
    assert instance.model.reorderer is not None
    instance.model.reorderer.join()
    assert isinstance(instance.model.weights.layer(0).qkv, OneDnnMatrix) is is_done
    instance.close()


def test_what_is_available_is_read(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_bytes(meminfo) == float("inf")
    meminfo.write_text("MemTotal:  8000 kB\nMemAvailable:  300 kB\n")
    assert available_bytes(meminfo) == 300 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="there the allocator is another")
def test_the_memory_of_the_copies_goes_back_to_the_system(model_of: ModelOf) -> None:
    """Copies of some megabytes lie in the heap once something larger was freed, and what is beside them stays."""
    instance = _reordered_instance(model_of("llama", dtype="bfloat16"))
    torch.empty(30 << 20, dtype=torch.uint8)
    before = _anonymous_bytes()
    beside: list[bytearray] = []
    for layer in range(instance.config.num_layers):
        qkv, o, gate_up, down = (_copy_of_megabytes(beside) for _ in range(4))
        swapped = replace(instance.model.weights.layer(layer), qkv=qkv, o=o, gate_up=gate_up, down=down)
        instance.model.weights.replace_layer(layer, swapped)
    del qkv, o, gate_up, down, swapped
    assert _anonymous_bytes() - before > 40 << 20
    instance.close()
    assert _anonymous_bytes() - before < 16 << 20
    assert len(beside) == 12


def test_the_engines_own_threads_stay_as_many(model_of: ModelOf) -> None:
    """Read before anything computes here again: the next layer would set them anew."""
    torch.set_num_threads(2)
    instance = _reordered_instance(model_of("llama", dtype="bfloat16"))
    assert torch.get_num_threads() == 2
    instance.close()


def _copy_of_megabytes(beside: list[bytearray]) -> OneDnnMatrix:
    copy = OneDnnMatrix(torch.ones(1024, 2048).bfloat16())
    beside.append(bytearray(1 << 16))
    return copy


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _reordered_instance(model: Model) -> Instance:
    instance = model.instance(cpu_reorder=True, reorderer=at_once)
    assert isinstance(instance.model.reorderer, Reorderer)
    instance.model.reorderer.join()
    return instance
