"""Reordered weights give the same results, and replace the originals while the instance is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.unit.engine.harness import Model, ModelOf, assert_idle, group_of, last_logits, outputs, prompt_of, run
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

# oneDNN reorders bf16 weights on CPUs with AVX-512 only; elsewhere the same tests reorder fp32 weights.
DTYPE = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
DTYPE_NAME = str(DTYPE).removeprefix("torch.")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Restores this process's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Reorders on any CPU, as if it had arithmetic of the dtype. The thread starts at once.
at_once = partial(Reorderer, delay_s=0.0, gains=lambda dtype: dtype == DTYPE)


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_reordered_product_equals_plain(rows: int, with_bias: bool) -> None:
    weight = torch.randn(72, 48).to(DTYPE)
    x, bias = torch.randn(rows, 48).to(DTYPE), torch.randn(72).to(DTYPE) if with_bias else None
    actual = linear(x, OneDnnMatrix(weight), bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.dtype == DTYPE
    assert torch.allclose(actual.double(), exact, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_without_native_arithmetic_stay(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(reorderer, "has_arithmetic", lambda asked: asked == torch.float32)
    weight = torch.randn(8, 8).to(dtype)
    assert reordered(weight) is weight


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3-moe"])
def test_reordered_logits_stay_within_tolerance(model_of: ModelOf, family: str) -> None:
    """The tolerance of `test_exactness.py`."""
    model, prompt = model_of(family, dtype=DTYPE_NAME), prompt_of(40)
    instance = _reordered_instance(model)
    assert isinstance(instance.model.weights.layer(0).qkv, OneDnnMatrix)
    tolerance = 0.3 if instance.config.experts is not None else 0.15
    assert float((last_logits(instance, prompt) - model.logits(prompt)[0]).abs().max()) < tolerance
    instance.close()


def test_fp32_output_is_unchanged(model_of: ModelOf) -> None:
    model = model_of("qwen3")
    instance = model.instance(cpu_reorder=True, reorderer=partial(Reorderer, delay_s=0.0))
    assert instance.model.reorderer is not None
    instance.model.reorderer.join()
    assert isinstance(instance.model.weights.layer(0).qkv, torch.Tensor)
    instance.prefill(group_of(prompt_of(17)))
    assert outputs(run(instance)) == {("r/0", 0): model.expected(prompt_of(17))}
    assert_idle(instance)


def test_layers_are_replaced_during_request(model_of: ModelOf) -> None:
    """Layers are replaced between steps; each token is nearly the most likely one for transformers."""
    model = model_of("llama", dtype=DTYPE_NAME)
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
        (logits,) = model.logits((*prompt_of(17), *output[:position]))
        assert float(logits.max() - logits[token]) < 0.15
    assert_idle(instance)


def test_close_ends_reorder_thread(model_of: ModelOf) -> None:
    model = model_of("llama", dtype=DTYPE_NAME)
    for loaded in (False, True):
        instance = model.instance(loaded=loaded, cpu_reorder=True, reorderer=at_once)
        swapping = instance.model.reorderer
        assert swapping is not None
        instance.close()
        assert not swapping.is_running
        swapping.start()  # the last segment came too late
        assert not swapping.is_running


@pytest.mark.parametrize(("available", "is_done"), [(1.9, False), (2.1, True)])
def test_weights_are_copied_only_with_enough_memory(model_of: ModelOf, available: float, is_done: bool) -> None:
    model = model_of("llama", dtype=DTYPE_NAME)
    num_bytes = available * model.pack.manifest.num_bytes
    instance = model.instance(cpu_reorder=True, reorderer=partial(at_once, available_bytes=lambda: num_bytes))
    assert instance.model.reorderer is not None
    instance.model.reorderer.join()
    assert isinstance(instance.model.weights.layer(0).qkv, OneDnnMatrix) is is_done
    instance.close()


def test_available_memory_is_read(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_bytes(meminfo) == float("inf")
    meminfo.write_text("MemTotal:  8000 kB\nMemAvailable:  300 kB\n")
    assert available_bytes(meminfo) == 300 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other allocators")
def test_memory_of_copies_returns_to_system(model_of: ModelOf) -> None:
    """Copies of a few megabytes are in the heap once something larger was freed, between allocations that stay."""
    instance = _reordered_instance(model_of("llama", dtype=DTYPE_NAME))
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


def test_reordering_keeps_engine_threads(model_of: ModelOf) -> None:
    """The number is read before another computation, whose next layer would set it again."""
    torch.set_num_threads(2)
    instance = _reordered_instance(model_of("llama", dtype=DTYPE_NAME))
    assert torch.get_num_threads() == 2
    instance.close()


def _copy_of_megabytes(beside: list[bytearray]) -> OneDnnMatrix:
    copy = OneDnnMatrix(torch.ones(1024, 2048).to(DTYPE))
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
