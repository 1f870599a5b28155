"""Models with weights in int8 compute what the same weights in fp32 give, and read them where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.int8_checkpoints import dequantized_checkpoint, int8_checkpoint
from tests.unit.engine.harness import Model, group_of, last_logits, outputs, prompt_of, run
from tests.unit.engine.kernels.cpu.counted_layers import assert_same_logits, instances
from torchrelay.engine.kernels.cpu.library import LEVELS, Kernels
from torchrelay.engine.kernels.layer import Int8Matrix

LENGTHS = (1, 17, 70)
FP32_TOLERANCE = 1e-4  # of the largest logit: the products are added in another order
BF16_TOLERANCE = 0.04  # of the logits' mean square; bf16 rounds by 0.4 % and a model of three layers about 50 times


def models(folder: Path, family: str, dtype: str) -> tuple[Model, Model]:
    """A model in int8, and the same weights in fp32."""
    source = make_checkpoint(folder / "model", family, dtype=dtype)
    int8 = int8_checkpoint(source)
    return Model(int8), Model(dequantized_checkpoint(source, int8, torch.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_equal_those_of_dequantized_weights(tmp_path: Path, family: str) -> None:
    model, reference = models(tmp_path, family, "float32")
    instance = model.instance(prefix_cache=False)
    for length in LENGTHS:
        prompt = prompt_of(length)
        expected = reference.logits(prompt)[0]
        error = float((last_logits(instance, prompt) - expected).abs().max())
        assert error < FP32_TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "granite"])
def test_16_bit_logits_are_near_those_of_dequantized_weights(tmp_path: Path, family: str, dtype: str) -> None:
    model, reference = models(tmp_path, family, dtype)
    instance = model.instance(prefix_cache=False)
    for length in LENGTHS:
        prompt = prompt_of(length)
        expected = reference.logits(prompt)[0]
        error = (last_logits(instance, prompt) - expected).square().mean().sqrt()
        assert float(error) < BF16_TOLERANCE * float(expected.square().mean().sqrt())


def test_int8_tokens_are_those_of_dequantized_weights(tmp_path: Path) -> None:
    model, reference = models(tmp_path, "llama", "float32")
    instance = model.instance()
    for number in range(4):
        instance.prefill(group_of(prompt_of(17, number), f"{number}/0"))
    answers = outputs(run(instance))
    for number in range(4):
        assert answers[f"{number}/0", 0] == reference.expected(prompt_of(17, number))


@pytest.mark.parametrize("level", [level for level in LEVELS if level.runs_here], ids=lambda level: str(level.name))
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_whole_layers_equal_single_operations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: object, family: str
) -> None:
    model = Model(int8_checkpoint(make_checkpoint(tmp_path / "model", family, dtype="bfloat16")))
    plain, whole, counted = instances(monkeypatch, Kernels(level), model)  # type: ignore[arg-type]
    assert_same_logits(plain, whole, 7)
    assert counted.calls.count(whole.config.num_layers) >= 25


def test_pack_is_about_half_and_read_in_place(tmp_path: Path) -> None:
    """Of a model whose embeddings are a small part, as in large models."""
    source = make_checkpoint(
        tmp_path / "model", "llama", dtype="bfloat16", hidden_size=256, intermediate_size=1024, num_hidden_layers=4
    )
    whole, model = Model(source), Model(int8_checkpoint(source))
    assert model.pack.manifest.num_bytes < 0.6 * whole.pack.manifest.num_bytes
    instance, view = model.instance(), torch.frombuffer(model.pack.data, dtype=torch.uint8)
    begin, end = view.data_ptr(), view.data_ptr() + len(view)
    for number in range(instance.config.num_layers):
        layer = instance.model.weights.layer(number)
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert isinstance(matrix, Int8Matrix)
            for tensor in (matrix.numbers, matrix.scales):
                assert begin <= tensor.data_ptr() <= end - tensor.nbytes
