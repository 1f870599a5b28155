"""The tensors come in execution order."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def test_segments_are_embeddings_then_layers_then_head() -> None:
    config = read_config(LLAMA)
    segments = list(tensors_by_segment(config))
    assert len(segments) == config.num_segments == 4
    assert [slot.name for slot in segments[0]] == ["model.embed_tokens.weight"]
    assert [slot.name for slot in segments[-1]] == ["model.norm.weight", "lm_head.weight"]
    assert all(slot.name.startswith("model.layers.1.") for slot in segments[2])
    assert [slot.shape for slot in segments[1] if slot.group == "qkv"] == [(64, 64), (32, 64), (32, 64)]


def test_norms_of_an_encoder_lie_before_the_layer_that_reads_them() -> None:
    config = read_config(LLAMA | {"architectures": ["BertModel"]})
    segments = list(tensors_by_segment(config))
    assert len(segments) == config.num_segments == 4
    assert {slot.group for slot in segments[0]} == {"embed", "positions", "token_types"}
    assert [segment[0].name for segment in segments[1:]] == [
        "embeddings.LayerNorm.weight",
        "encoder.layer.0.output.LayerNorm.weight",
        "encoder.layer.1.output.LayerNorm.weight",
    ]
    assert [slot.group for slot in segments[-1]] == ["norm", "norm_bias"]


def test_tied_weights_are_stored_once() -> None:
    segments = list(tensors_by_segment(read_config(LLAMA | {"tie_word_embeddings": True})))
    assert [slot.name for slot in segments[-1]] == ["model.norm.weight"]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("Qwen2ForCausalLM", "qkv_bias"),
        ("Qwen3ForCausalLM", "q_norm"),
        ("Qwen3ForCausalLM", "k_norm"),
        ("Gemma2ForCausalLM", "attention_out_norm"),
        ("Gemma2ForCausalLM", "mlp_out_norm"),
    ],
)
def test_families_differ_in_their_tensors(name: str, group: str) -> None:
    def groups(config: dict[str, Any]) -> set[str]:
        return {slot.group for slot in list(tensors_by_segment(read_config(config)))[1]}

    assert group in groups(LLAMA | {"architectures": [name]})
    assert group not in groups(LLAMA)


def test_experts_lie_side_by_side() -> None:
    names = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
    layer = list(tensors_by_segment(read_config(LLAMA | names)))[1]
    assert [slot.name.split("experts.")[1] for slot in layer if slot.group == "gate_up"] == [
        f"{expert}.{part}.weight" for expert in range(3) for part in ("w1", "w3")
    ]
    assert sum(slot.shape[0] for slot in layer if slot.group == "down") == 3 * 64
    assert [slot.shape for slot in layer if slot.group == "router"] == [(3, 64)]


def test_fused_checkpoint_has_fused_tensors() -> None:
    layer = list(tensors_by_segment(read_config(LLAMA | {"architectures": ["Phi3ForCausalLM"]})))[1]
    assert [slot.shape for slot in layer if slot.group in ("qkv", "gate_up")] == [(128, 64), (192, 64)]
