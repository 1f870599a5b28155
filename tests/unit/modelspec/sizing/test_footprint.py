"""Footprints equal the sums over the tensors of packs."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from tests.unit.modelspec.test_config import LLAMA, QWEN2_MOE, QWEN3_MOE
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT
from torchrelay.modelspec.sizing.footprint import footprint_of
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, tensors_by_segment

LARGE: dict[str, Any] = LLAMA | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000}
FORMS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"dtype": "float32"},
    {"num_key_value_heads": 4, "head_dim": 64},
    QWEN3_MOE | {"moe_intermediate_size": 512, "num_experts_per_tok": 2},
    QWEN2_MOE | {"moe_intermediate_size": 512, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    {"architectures": ["Phi3ForCausalLM"]},
    {"quantization_config": INT8_PER_OUTPUT},
]


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_packs_tensors(form: dict[str, Any]) -> None:
    config = LARGE | {"dtype": "bfloat16"} | form
    parsed, wide = read_config(config), DTYPE_BYTES["F32" if form.get("dtype") == "float32" else "BF16"]
    sizes = {"": wide, "I8": 1, **DTYPE_BYTES}
    tensors = [tensor for segment in tensors_by_segment(parsed) for tensor in segment]
    expected = sum(prod(tensor.shape) * sizes[tensor.dtype] for tensor in tensors)
    assert footprint_of(config).weights_bytes == pytest.approx(expected, rel=0.01)


def test_a_token_reads_and_computes_its_own_experts() -> None:
    experts = QWEN3_MOE | {"moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 2}
    model = footprint_of(LARGE | experts)
    one, all_of_them = model.read_bytes(1), model.read_bytes(1000)
    assert one == pytest.approx(model.shared_bytes + model.expert_bytes / 8)
    assert all_of_them == pytest.approx(model.shared_bytes + model.expert_bytes)
    dense = footprint_of(LARGE | experts | {"num_experts_per_tok": 16})
    assert model.flops_per_token < dense.flops_per_token == pytest.approx(all_of_them)


def test_windowed_layers_attend_to_their_window() -> None:
    model = footprint_of(LARGE | {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8})
    assert model.attended(4) == 4
    assert model.attended(108) == (8 + 108) / 2


def test_int8_halves_the_linear_layers() -> None:
    wide, narrow = footprint_of(LARGE), footprint_of(LARGE, to_int8=True)
    assert narrow.shared_bytes < 0.7 * wide.shared_bytes
    assert narrow.flops_per_token == wide.flops_per_token
    with pytest.raises(UnsupportedModel, match="quantized already"):
        footprint_of(LARGE | {"quantization_config": INT8_PER_OUTPUT}, to_int8=True)


def test_files_replace_the_sum_of_shapes() -> None:
    assert footprint_of(LARGE, 123_456_789).weights_bytes == 123_456_789


def test_a_model_that_only_vllm_knows_is_sized_by_its_files() -> None:
    config = LARGE | {"architectures": ["FalconForCausalLM"], "dtype": "bfloat16"}
    model = footprint_of(config, 10**9)
    assert (model.weights_bytes, model.flops_per_token, model.kv_bytes_per_token) == (1e9, 1e9, 2 * 2 * 2 * 128 * 2)
    with pytest.raises(UnsupportedModel):
        footprint_of(config)
    with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
        footprint_of(LARGE | {"num_hidden_layers": 0})


def test_eight_bit_activations_use_the_eight_bit_peak() -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    model = footprint_of(LARGE | {"quantization_config": fp8}, 10_000_000)
    assert model.has_8bit_activations and model.weights_bytes == 10_000_000
