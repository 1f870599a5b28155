"""Configs are read exactly, also of text parts, or refused by field; the tensors come in execution order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.modelspec.architectures import ARCHITECTURES
from torchrelay.modelspec.config import ModelConfig, RopeConfig, RopeScaling, declared_dtype, read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.modelspec.text_part import text_config, text_tensor_name

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
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 8}
QWEN3_MOE = EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]}
QWEN2_MOE = EXPERTS | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 16}
WINDOW: dict[str, Any] = {"sliding_window": 8, "use_sliding_window": True}
FULL, SLIDING = "full_attention", "sliding_attention"
QWEN2_WINDOWED: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
SCALED, LINEAR = RopeScaling(8, 1, 4, 32), {"type": "linear"}


@pytest.mark.parametrize(
    ("name", "config", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, [None] * 4),
        ("MistralForCausalLM", {"sliding_window": 8}, [8] * 4),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 4),
        ("MistralForCausalLM", {}, [4096] * 4),
        ("MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 1}, [None] * 4),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, [4096] * 4),
        ("Gemma2ForCausalLM", {}, [4096, None, 4096, None]),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, [None] * 4),
        ("Qwen2ForCausalLM", WINDOW | {"max_window_layers": 3}, [None] * 3 + [8]),
        ("Qwen2MoeForCausalLM", QWEN2_MOE, [None] * 4),
        ("Qwen2MoeForCausalLM", QWEN2_MOE | WINDOW, [8, None, 8, None]),
        ("Qwen2MoeForCausalLM", QWEN2_MOE | WINDOW | {"max_window_layers": 2}, [8, None, None, None]),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, [8, None, 8, None]),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 3}, [8, 8, None, 8]),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]}, [None, 8, 8, 8]),
    ],
)
def test_windows_follow_rules_of_each_family(name: str, config: dict[str, Any], windows: list[int | None]) -> None:
    parsed = read_config(LLAMA | {"architectures": [name], "num_hidden_layers": 4} | config)
    assert list(parsed.windows) == windows


@pytest.mark.parametrize(
    ("name", "config", "rope", "local"),
    [
        ("LlamaForCausalLM", {}, RopeConfig(10_000.0), None),
        ("LlamaForCausalLM", {"rope_theta": 5e5}, RopeConfig(5e5), None),
        ("LlamaForCausalLM", {"rope_scaling": LLAMA3, "rope_theta": 5e5}, RopeConfig(5e5, SCALED), None),
        ("LlamaForCausalLM", {"rope_parameters": LLAMA3 | {"rope_theta": 9.0}}, RopeConfig(9.0, SCALED), None),
        ("LlamaForCausalLM", {"rope_scaling": LINEAR | {"factor": 2.0}}, RopeConfig(1e4, linear_factor=2.0), None),
        (
            "Gemma3ForCausalLM",
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 77.0},
            RopeConfig(1e6, linear_factor=8.0),
            RopeConfig(77.0),
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {FULL: {"rope_theta": 5.0}, SLIDING: {"rope_theta": 6.0}}},
            RopeConfig(5.0),
            RopeConfig(6.0),
        ),
    ],
)
def test_old_and_new_rope_configs_agree(
    name: str, config: dict[str, Any], rope: RopeConfig, local: RopeConfig | None
) -> None:
    parsed = read_config(LLAMA | {"architectures": [name]} | config)
    assert (parsed.rope, parsed.local_rope) == (rope, local)


def test_gemma_defaults_are_filled() -> None:
    parsed = read_config(LLAMA | {"architectures": ["Gemma2ForCausalLM"]})
    assert (parsed.head_dim, parsed.tied_embeddings, parsed.activation) == (256, True, "gelu_pytorch_tanh")
    assert (parsed.score_cap, parsed.logit_cap, parsed.query_scale) == (50.0, 30.0, 256**-0.5)


@pytest.mark.parametrize(("name", "eps"), [("LlamaForCausalLM", 1e-6), ("Phi3ForCausalLM", 1e-5)])
def test_norms_follow_family(name: str, eps: float) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    assert read_config(config | {"architectures": [name]}).norm_eps == eps


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_by_either_name(key: str) -> None:
    config = {**LLAMA, **QWEN3_MOE, "num_experts_per_tok": 3, "norm_topk_prob": True}
    del config["num_experts"]
    experts = read_config(config | {key: 5}).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate_size, experts.norm_topk_prob) == (5, 3, 8, True)


def test_layers_without_experts() -> None:
    config = LLAMA | QWEN3_MOE | {"num_experts_per_tok": 2, "num_hidden_layers": 6, "mlp_only_layers": [3]}
    for step, dense in ((1, {3}), (2, {0, 2, 3, 4}), (9, set(range(6)))):
        experts = read_config(config | {"decoder_sparse_step": step}).experts
        assert experts is not None and experts.dense_layers == dense


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, None),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "BF16"),
        ({"torch_dtype": "float16"}, "F16"),
        ({"dtype": None, "torch_dtype": "float32"}, "F32"),
        ({"dtype": "int8"}, None),
        ({"dtype": ["float32"]}, None),
    ],
)
def test_dtype_is_declared_by_either_key(config: dict[str, Any], dtype: str | None) -> None:
    assert declared_dtype(LLAMA | config) == dtype
    multimodal = {"architectures": ["LlavaForConditionalGeneration"], "text_config": LLAMA | {"model_type": "llama"}}
    assert declared_dtype(multimodal | config) == dtype


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": 1026}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation"),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1}, "attn_logit_softcapping"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "layer_types": ["linear"]}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "8"}, "sliding_window"),
        ({"architectures": ["MixtralForCausalLM"]}, "num_local_experts"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 1}, "num_experts_per_tok"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1e308}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": 1e-300}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": 3}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0]}}, "rope_scaling"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": None}, "sliding_window"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": [[], []]}, "layer_types"),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 5.0}}, "rope_parameters"),
        (QWEN2_WINDOWED | {"max_window_layers": "2"}, "max_window_layers"),
        ({"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": None}, "head_dim"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        (QWEN3_MOE | {"num_experts": 2**31}, "num_experts"),
        (QWEN3_MOE, "num_experts_per_tok"),
        (QWEN3_MOE | {"mlp_only_layers": [9]}, "mlp_only_layers"),
        (QWEN3_MOE | {"mlp_only_layers": {"1": 1}}, "mlp_only_layers"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN2_MOE | {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    ],
)
def test_unsupported_feature_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_config(LLAMA | change)
    assert refused.value.field == field


BERT = LLAMA | {"architectures": ["BertModel"]}
ROBERTA = LLAMA | {"architectures": ["RobertaModel"]}


def test_positions_of_encoders() -> None:
    bert, roberta = read_config(BERT), read_config(ROBERTA)
    assert (bert.max_context_tokens, bert.has_head, bert.norm_eps) == (128, False, 1e-12)
    assert (bert.num_heads, bert.num_kv_heads) == (4, 1), "its pages are small, since it writes nothing to them"
    assert (roberta.max_context_tokens, roberta.has_head) == (126, False)
    assert read_config(ROBERTA | {"pad_token_id": 0}).max_context_tokens == 127
    assert bert.encoder is not None and bert.encoder.padding_id is None and bert.encoder.num_positions == 128
    assert roberta.encoder is not None and roberta.encoder.padding_id == 1 and roberta.encoder.num_positions == 128


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (BERT | {"hidden_act": "silu"}, "hidden_act"),
        (BERT | {"hidden_size": 66}, "hidden_size"),
        (BERT | {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (BERT | {"is_decoder": True}, "is_decoder"),
        (BERT | {"add_cross_attention": True}, "add_cross_attention"),
        (BERT | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (BERT | {"type_vocab_size": 0}, "type_vocab_size"),
        (BERT | {"layer_norm_eps": "small"}, "layer_norm_eps"),
        (BERT | {"num_hidden_layers": 2**40}, "num_hidden_layers"),
        (ROBERTA | {"pad_token_id": 127}, "pad_token_id"),
        (ROBERTA | {"pad_token_id": -1}, "pad_token_id"),
        (ROBERTA | {"pad_token_id": None}, "pad_token_id"),
    ],
)
def test_unsupported_encoder_is_refused_by_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read_config(config)
    assert refused.value.field == field


KEYS = (
    *LLAMA,
    *["architectures", "head_dim", "hidden_act", "hidden_activation", "rope_parameters", "rope_scaling", "rope_theta"],
    *["layer_types"],
    *["rope_local_base_freq", "sliding_window", "sliding_window_pattern", "use_sliding_window", "max_window_layers"],
    *["query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor"],
    *["no_rope_layers", "attention_multiplier", "original_max_position_embeddings", "attention_bias"],
    *["position_embedding_type", "pad_token_id", "type_vocab_size", "layer_norm_eps", "is_decoder"],
    *["num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"],
    *["decoder_sparse_step", "shared_expert_intermediate_size"],
)
ROPE_KEYS = (
    *("rope_type", "factor", "rope_theta", "full_attention", "sliding_attention", "low_freq_factor"),
    *("short_factor", "attention_factor", "partial_rotary_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "original_max_position_embeddings"),
)
NAMES = ["linear", "llama3", "yarn", "longrope", "default", FULL]
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([2**31, 2**63, 10**4000])
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(NAMES)
VALUES = st.recursive(
    SCALARS,
    lambda members: st.lists(members, max_size=4) | st.dictionaries(st.sampled_from(ROPE_KEYS), members, max_size=4),
    max_leaves=6,
)


@given(st.sampled_from(sorted(ARCHITECTURES)), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_config_is_read_or_refused_by_field(name: str, changes: dict[str, Any]) -> None:
    config = {**LLAMA, "architectures": [name], **changes}
    try:
        assert len(read_config(config).windows) == read_config(config).num_layers
    except UnsupportedModel as refused:
        assert refused.field


LLAVA, GEMMA3, MISTRAL3 = (f"{name}ForConditionalGeneration" for name in ("Llava", "Gemma3", "Mistral3"))


def multimodal(name: str, text: Any, **outer: Any) -> dict[str, Any]:
    return {"architectures": [name], "text_config": text, "vision_config": {"hidden_size": 8}, **outer}


def of_transformers(architecture: str, config: str, **text: Any) -> ModelConfig:
    """The model of a config in which transformers fills in all defaults."""
    import transformers  # takes seconds

    return read_config(getattr(transformers, config)(**text).to_dict() | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("name", "model_type", "architecture", "config", "text"),
    [
        (GEMMA3, "gemma3_text", "Gemma3ForCausalLM", "Gemma3TextConfig", {"hidden_size": 2560, "sliding_window": 1024}),
        (LLAVA, "llama", "LlamaForCausalLM", "LlamaConfig", {"vocab_size": 32_064, "max_position_embeddings": 4096}),
        (MISTRAL3, "mistral", "MistralForCausalLM", "MistralConfig", {"head_dim": 128, "sliding_window": None}),
    ],
)
def test_keys_left_out_have_the_defaults_of_transformers(
    name: str, model_type: str, architecture: str, config: str, text: dict[str, Any]
) -> None:
    parsed = read_config(multimodal(name, text | {"model_type": model_type}))
    assert parsed == of_transformers(architecture, config, **text)


@pytest.mark.parametrize(
    ("name", "of_text", "of_whole", "tied"),
    [
        (LLAVA, True, False, True),
        (LLAVA, True, None, True),
        (LLAVA, False, True, True),
        (MISTRAL3, True, False, False),
        (MISTRAL3, False, None, False),
        (MISTRAL3, None, True, True),
    ],
)
def test_head_is_tied_as_in_transformers(name: str, of_text: bool | None, of_whole: bool | None, tied: bool) -> None:
    values = {"text": of_text, "whole": of_whole}
    text, whole = ({} if value is None else {"tie_word_embeddings": value} for value in values.values())
    assert read_config(multimodal(name, LLAMA | {"model_type": "llama"} | text, **whole)).tied_embeddings is tied


def test_end_tokens_of_the_whole_count_first() -> None:
    text = LLAMA | {"model_type": "llama", "eos_token_id": 5}
    assert text_config(multimodal(LLAVA, text))["eos_token_id"] == 5
    assert text_config(multimodal(LLAVA, text, eos_token_id=[1, 6]))["eos_token_id"] == [1, 6]


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (multimodal(LLAVA, {"model_type": "cohere2"}), "text_config.model_type", "the text part 'cohere2' is not"),
        (multimodal(LLAVA, {}), "text_config.model_type", "the text part null is not supported; supported are llama,"),
        (multimodal(LLAVA, []), "text_config", "text_config must be an object"),
        (
            multimodal(LLAVA, {**LLAMA, "model_type": "llama", "hidden_size": 0}),
            "text_config.hidden_size",
            "hidden_size must be a positive whole number, not 0",
        ),
        (
            multimodal(LLAVA, {**LLAMA, "model_type": "llama"}, quantization_config={"bits": 4}),
            "text_config.quantization_config.quant_method",
            "quant_method null is not supported; supported are awq, gptq, fp8, compressed-tensors",
        ),
        (
            multimodal("PaliGemmaForConditionalGeneration", {**LLAMA, "model_type": "gemma2"}),
            "architectures",
            "'PaliGemmaForConditionalGeneration' is not supported; supported are LlamaForCausalLM,",
        ),
    ],
)
def test_unsupported_text_parts_are_refused_by_field(config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as refused:
        read_config(config)
    assert refused.value.field == field


def test_names_of_all_layouts_map_to_the_text_model() -> None:
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight", "model.norm.weight"):
        assert text_tensor_name(name) == "model.norm.weight"
    assert text_tensor_name("language_model.lm_head.weight") == text_tensor_name("lm_head.weight") == "lm_head.weight"
    others = ("vision_tower.a", "model.vision_tower.a", "multi_modal_projector.b", "visual.c", "model.visual.c")
    assert {text_tensor_name(name) for name in (*others, "image_newline", "model.image_newline")} == {None}


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
