"""Whole layers in one call give the same bits as single operations."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.harness import ModelOf, group_of, prompt_of, run
from tests.unit.engine.kernels.cpu.counted_layers import assert_same_logits, instances, logits_of
from torchrelay.engine.kernels.cpu.library import Kernels
from torchrelay.engine.kernels.layer import LayerWeights
from torchrelay.engine.kernels.linear import linear
from torchrelay.engine.weights.segment_gate import SegmentGate


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_layers_equal_single_operations(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, family: str, dtype: str
) -> None:
    """Decode steps and short prompts are one call; long prompts run as single operations, and so do experts, heads that
    are rotated in part, biases of outputs, layers without input norms, and factors of residuals. A layer without
    experts among others is a call of its own.
    """
    plain, whole, counted = instances(monkeypatch, model_of(family, dtype=dtype), built, max_products=600)
    assert_same_logits(plain, whole, 7)
    num_layers = whole.config.num_layers
    config = whole.config
    is_whole = config.rotates_whole_heads and not config.attention_bias and config.multipliers.residual == 1.0
    if config.experts is not None and config.experts.dense_layers:
        assert set(counted.calls) == {0, 1}
    elif config.experts is None and is_whole and config.architecture.input_norms:
        assert set(counted.calls) == {0, num_layers}
        assert counted.calls.count(num_layers) >= 25
        assert counted.rows[0] == 40 and counted.calls[0] == num_layers  # a budget of prompts
    else:
        assert set(counted.calls) == {0}


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_are_shared_between_threads(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, family: str
) -> None:
    assert torch.get_num_threads() == 3
    plain, whole, counted = instances(monkeypatch, model_of(family, dtype="bfloat16"), built)
    assert_same_logits(plain, whole, 9)
    assert whole.config.num_layers in counted.calls


def test_fp32_layers_run_as_single_operations(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels
) -> None:
    """Single operations request the layer's weights once more, and not the weights of the layers above it."""
    _, whole, counted = instances(monkeypatch, model_of(), built)
    weights, asked = whole.model.weights, []
    layer = weights.layer

    def spy(number: int) -> LayerWeights:
        asked.append(number)
        return layer(number)

    weights.layer = spy  # type: ignore[method-assign, assignment]
    assert logits_of(whole, 2)
    assert set(counted.calls) == {0}
    assert len(counted.calls) <= len(asked) <= 2 * len(counted.calls)


def test_batch_over_max_rows_runs_as_single_operations(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels
) -> None:
    """Batches of ``max_rows`` rows run as whole layers, larger ones do not."""
    _, whole, counted = instances(monkeypatch, model_of(dtype="bfloat16"), built, limits={"max_rows": 3})
    logits_of(whole, 3)
    logits_of(whole, 4)
    computed = {rows for rows, num_layers in zip(counted.rows, counted.calls, strict=True) if num_layers}
    assert max(computed) == 3 and 4 in counted.rows


@pytest.mark.parametrize("num_layers", [1, 2])
def test_call_is_limited_to_max_layers(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, num_layers: int
) -> None:
    """Groups are cancelled between calls, and a call of a large model or of many rows would take long."""
    limits = {"max_layers": num_layers}
    plain, whole, counted = instances(monkeypatch, model_of("gemma3", dtype="bfloat16"), built, limits=limits)
    assert_same_logits(plain, whole, 3)
    assert max(counted.calls) == num_layers < whole.config.num_layers
    assert {done for done, rows in zip(counted.calls, counted.rows, strict=True) if rows == 40} == {1}  # 2 * 32 / 40


def test_call_is_one_layer_while_pack_arrives(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels
) -> None:
    """The cores are divided between arrival and computation before each layer."""
    plain, whole, counted = instances(monkeypatch, model_of(dtype="bfloat16"), built)
    monkeypatch.setattr(SegmentGate, "all_open", False)
    assert_same_logits(plain, whole, 3)
    assert set(counted.calls) == {1}


def test_replaced_layers_run_from_their_new_form(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels
) -> None:
    """A replaced layer is read at its new address; a layer in another form runs as single operations."""

    class Elsewhere:
        def __init__(self, matrix: Tensor) -> None:
            self.matrix = matrix

        def __call__(self, x: Tensor) -> Tensor:
            return linear(x, self.matrix)

    plain, whole, counted = instances(monkeypatch, model_of(dtype="bfloat16"), built)
    before = logits_of(whole, 3)
    num_layers = whole.config.num_layers
    for weights in plain.model.weights, whole.model.weights:
        first, last = weights.layer(0), weights.layer(num_layers - 1)
        assert isinstance(first.o, Tensor) and isinstance(last.o, Tensor)
        weights.replace_layer(0, replace(first, o=2 * first.o))
        weights.replace_layer(num_layers - 1, replace(last, o=Elsewhere(last.o)))
    counted.calls.clear()
    expected, actual = logits_of(plain, 3), logits_of(whole, 3)
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))
    assert not torch.equal(actual[0], before[0])
    assert set(counted.calls) == {0, num_layers - 1}  # the last one


@pytest.mark.parametrize(("layers_at_once", "calls"), [(0, [1, 1, 1]), (1, [1, 1, 1]), (2, [2, 1]), (9, [3])])
def test_kv_is_handed_over_every_few_layers(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels, layers_at_once: int, calls: list[int]
) -> None:
    model, blocks = model_of(dtype="bfloat16"), list[dict[int, bytes]]()
    min_bytes = layers_at_once * 20 * model.instance().kv_shape.bytes_per_token_layer
    plain, whole, counted = instances(monkeypatch, model, built, min_handover_bytes=min_bytes)
    for instance in plain, whole:
        actual: dict[int, bytes] = {}
        group = group_of(prompt_of(20))
        instance.prefill(group, lambda block, actual=actual: actual.update({block.index: bytes(block.data)}))  # type: ignore[misc]
        run(instance)
        assert len(actual) == instance.kv_layout(group).num_kv_chunks
        blocks.append(actual)
    assert blocks[0] == blocks[1]
    assert counted.calls == calls


def test_cached_kv_counts_for_first_hand_over(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels
) -> None:
    model = model_of(dtype="bfloat16")
    settings: dict[str, Any] = {"token_budget": 512, "page_tokens": 16, "prefix_cache": True}
    min_bytes = 40 * model.instance().kv_shape.bytes_per_token_layer
    _, whole, counted = instances(monkeypatch, model, built, min_handover_bytes=min_bytes, **settings)
    for number in range(2):
        whole.prefill(group_of(prompt_of(40), f"{number}/0"), lambda block: None)
        run(whole)
    assert counted.rows == [40] * 3 + [8] * 3
    assert counted.calls == [1] * 6


def test_replaced_layers_live_until_call_ends(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf, built: Kernels
) -> None:
    lived: list[bool] = []

    def layers(*arguments: object) -> int:
        weights, num_layers = whole.model.weights, whole.config.num_layers
        old = [weakref.ref(weights.layer(layer)) for layer in range(num_layers)]
        for layer in range(num_layers):
            weights.replace_layer(layer, replace(weights.layer(layer)))
        num_done: int = built.layers(*arguments)
        lived.extend(ref() is not None for ref in old)
        return num_done

    _, whole, counted = instances(monkeypatch, model_of(dtype="bfloat16"), built, layers=layers)
    logits_of(whole, 1)
    assert whole.config.num_layers in counted.calls and all(lived)
