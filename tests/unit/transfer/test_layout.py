"""Configs are read exactly or refused by field, and the tensors come in execution order."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.transfer.layout import UnsupportedModel, read_config, tensors_by_segment

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


def test_tied_weights_are_stored_once() -> None:
    segments = list(tensors_by_segment(read_config(LLAMA | {"tie_word_embeddings": True})))
    assert [slot.name for slot in segments[-1]] == ["model.norm.weight"]


@pytest.mark.parametrize(
    ("name", "group"),
    [("Qwen2ForCausalLM", "qkv_bias"), ("Qwen3ForCausalLM", "q_norm"), ("Qwen3ForCausalLM", "k_norm")],
)
def test_families_differ_in_their_tensors(name: str, group: str) -> None:
    def groups(config: dict[str, Any]) -> set[str]:
        return {slot.group for slot in list(tensors_by_segment(read_config(config)))[1]}

    assert group in groups(LLAMA | {"architectures": [name]})
    assert group not in groups(LLAMA)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_cannot_run_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_config(LLAMA | change)
    assert refused.value.field == field
