"""Whole layers in one call give the same bits as single operations, also if another process ends the call early."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import FAMILIES
from tests.unit.engine.harness import Clock, ModelOf, group_of, prompt_of, run
from tests.unit.engine.kernels.cpu.counted_layers import Counted, assert_same_logits, instances, logits_of
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.cpu.active_processes import ActiveProcesses
from torchrelay.engine.kernels.cpu.library import Kernels
from torchrelay.engine.kernels.layer import LayerWeights
from torchrelay.engine.kernels.linear import linear
from torchrelay.engine.weights.segment_gate import SegmentGate

Make = Callable[..., tuple[Instance, Instance, Counted]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, built: Kernels) -> Make:
    return partial(instances, monkeypatch, built)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_layers_equal_single_operations(make: Make, model_of: ModelOf, family: str, dtype: str) -> None:
    """Decode steps and short prompts are one call; long prompts run as single operations, and so do experts, heads that
    are rotated in part, biases of outputs, layers without input norms, and factors of residuals. A layer without
    experts among others is a call of its own.
    """
    plain, whole, counted = make(model_of(family, dtype=dtype), max_products=600)
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


def test_fp32_layers_run_as_single_operations(make: Make, model_of: ModelOf) -> None:
    """Single operations request the layer's weights once more, and not the weights of the layers above it."""
    _, whole, counted = make(model_of())
    weights, asked = whole.model.weights, []
    layer = weights.layer

    def spy(number: int) -> LayerWeights:
        asked.append(number)
        return layer(number)

    weights.layer = spy  # type: ignore[method-assign, assignment]
    assert logits_of(whole, 2)
    assert set(counted.calls) == {0}
    assert len(counted.calls) <= len(asked) <= 2 * len(counted.calls)


def test_batch_over_max_rows_runs_as_single_operations(make: Make, model_of: ModelOf) -> None:
    """Batches of ``max_rows`` rows run as whole layers, larger ones do not."""
    _, whole, counted = make(model_of(dtype="bfloat16"), limits={"max_rows": 3})
    logits_of(whole, 3)
    logits_of(whole, 4)
    computed = {rows for rows, num_layers in zip(counted.rows, counted.calls, strict=True) if num_layers}
    assert max(computed) == 3 and 4 in counted.rows


@pytest.mark.parametrize("num_layers", [1, 2])
def test_call_is_limited_to_max_layers(make: Make, model_of: ModelOf, num_layers: int) -> None:
    """Groups are cancelled between calls, and a call of a large model or of many rows would take long."""
    limits = {"max_layers": num_layers}
    plain, whole, counted = make(model_of("gemma3", dtype="bfloat16"), limits=limits)
    assert_same_logits(plain, whole, 3)
    assert max(counted.calls) == num_layers < whole.config.num_layers
    assert {done for done, rows in zip(counted.calls, counted.rows, strict=True) if rows == 40} == {1}  # 2 * 32 / 40


def test_call_is_one_layer_while_pack_arrives(make: Make, monkeypatch: pytest.MonkeyPatch, model_of: ModelOf) -> None:
    """The cores are divided between arrival and computation before each layer."""
    plain, whole, counted = make(model_of(dtype="bfloat16"))
    monkeypatch.setattr(SegmentGate, "all_open", False)
    assert_same_logits(plain, whole, 3)
    assert set(counted.calls) == {1}


def test_replaced_layers_run_from_their_new_form(make: Make, model_of: ModelOf) -> None:
    """A replaced layer is read at its new address; a layer in another form runs as single operations."""

    class Elsewhere:
        def __init__(self, matrix: Tensor) -> None:
            self.matrix = matrix

        def __call__(self, x: Tensor) -> Tensor:
            return linear(x, self.matrix)

    plain, whole, counted = make(model_of(dtype="bfloat16"))
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
    make: Make, model_of: ModelOf, layers_at_once: int, calls: list[int]
) -> None:
    model, blocks = model_of(dtype="bfloat16"), list[dict[int, bytes]]()
    min_bytes = layers_at_once * 20 * model.instance().kv_shape.bytes_per_token_layer
    plain, whole, counted = make(model, min_handover_bytes=min_bytes)
    for instance in plain, whole:
        actual: dict[int, bytes] = {}
        group = group_of(prompt_of(20))
        instance.prefill(group, lambda block, actual=actual: actual.update({block.index: bytes(block.data)}))  # type: ignore[misc]
        run(instance)
        assert len(actual) == instance.kv_layout(group).num_kv_chunks
        blocks.append(actual)
    assert blocks[0] == blocks[1]
    assert counted.calls == calls


def test_cached_kv_counts_for_first_hand_over(make: Make, model_of: ModelOf) -> None:
    model = model_of(dtype="bfloat16")
    settings: dict[str, Any] = {"token_budget": 512, "page_tokens": 16, "prefix_cache": True}
    min_bytes = 40 * model.instance().kv_shape.bytes_per_token_layer
    _, whole, counted = make(model, min_handover_bytes=min_bytes, **settings)
    for number in range(2):
        whole.prefill(group_of(prompt_of(40), f"{number}/0"), lambda block: None)
        run(whole)
    assert counted.rows == [40] * 3 + [8] * 3
    assert counted.calls == [1] * 6


def test_replaced_layers_live_until_call_ends(make: Make, model_of: ModelOf, built: Kernels) -> None:
    lived: list[bool] = []

    def layers(*arguments: object) -> int:
        weights, num_layers = whole.model.weights, whole.config.num_layers
        old = [weakref.ref(weights.layer(layer)) for layer in range(num_layers)]
        for layer in range(num_layers):
            weights.replace_layer(layer, replace(weights.layer(layer)))
        num_done: int = built.layers(*arguments)
        lived.extend(ref() is not None for ref in old)
        return num_done

    _, whole, counted = make(model_of(dtype="bfloat16"), layers=layers)
    logits_of(whole, 1)
    assert whole.config.num_layers in counted.calls and all(lived)


@pytest.mark.usefixtures("three_threads")
def test_call_ends_after_the_layer_before_which_another_process_changes(
    make: Make, model_of: ModelOf, built: Kernels, tmp_path: Path
) -> None:
    """The cores are then divided again, and another call computes the rest with the same result."""
    mine, theirs = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(2))
    acts: list[Callable[[], object]] = [partial(theirs.take_share, 4, 4), lambda: None, theirs.rest, lambda: None]
    next_act = cycle(acts)

    def layers(*arguments: object) -> int:
        next(next_act)()  # after this process counted
        num_done: int = built.layers(*arguments)
        return num_done

    model = model_of("gemma3", dtype="bfloat16")
    plain, whole, counted = make(model, layers=layers, processes=mine)
    assert_same_logits(plain, whole, 5)
    calls = [num_done for num_done in counted.calls if num_done]
    assert calls == [1, whole.config.num_layers - 1] * (len(calls) // 2) and len(calls) > 20


@pytest.mark.usefixtures("three_threads")
def test_call_ends_after_the_layer_that_follows_a_change(make: Make, model_of: ModelOf, built: Kernels) -> None:
    """The number that shows a change lies where the first layer of a call writes its hidden states."""

    def layers(*arguments: Any) -> int:
        batch = arguments[-1]._obj
        batch.change, batch.change_seen = batch.hidden, ctypes.c_int64.from_address(batch.hidden).value
        num_done: int = built.layers(*arguments)
        return num_done

    plain, whole, counted = make(model_of("gemma3", dtype="bfloat16"), layers=layers)
    assert_same_logits(plain, whole, 5)
    calls = [num_done for num_done in counted.calls if num_done]
    assert whole.config.num_layers == 3 and calls == [2, 1] * (len(calls) // 2) and len(calls) > 20


@pytest.mark.usefixtures("three_threads")
def test_threads_end_interrupted_call_together(make: Make, model_of: ModelOf, built: Kernels, tmp_path: Path) -> None:
    """Another process starts or rests while a call runs, at any moment of it."""
    mine, theirs = (ActiveProcesses(tmp_path / "cores", Clock()) for _ in range(2))
    calls: SimpleQueue[bool] = SimpleQueue()

    def layers(*arguments: object) -> int:
        calls.put(True)
        num_done: int = built.layers(*arguments)
        return num_done

    def toggle() -> None:
        alternate: list[Callable[[], object]] = [partial(theirs.take_share, 4, 4), theirs.rest]
        acts = cycle(alternate)
        while calls.get():
            next(acts)()

    model = model_of("gemma3", dtype="bfloat16")
    plain, whole, _ = make(model, layers=layers, processes=mine)
    toggling = Thread(target=toggle)
    toggling.start()
    try:
        assert_same_logits(plain, whole, 5)
    finally:
        calls.put(False)
        toggling.join()
