"""quantization_config: weights of either engine, their tensors, and the refusal of everything else by field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.quantized_checkpoints import FORMATS
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT, Int8Weights, quantized_weights
from torchrelay.modelspec.tensor_order import tensors_by_segment

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
# As llm-compressor writes it for a scheme with 8-bit activations (shortened).
WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "int",
}
GROUP = {
    "input_activations": WEIGHTS | {"dynamic": True, "strategy": "token"},
    "output_activations": None,
    "targets": ["Linear"],
    "weights": WEIGHTS,
}
W8A8: dict[str, Any] = {
    "config_groups": {"group_0": GROUP},
    "format": "int-quantized",
    "global_compression_ratio": 1.24,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def with_group(**changes: Any) -> dict[str, Any]:
    return W8A8 | {"config_groups": {"group_0": GROUP | changes}}


def test_int8_weights_are_recognised() -> None:
    assert quantized_weights(None) is None and quantized_weights({}) is None
    assert quantized_weights(W8A8) == Int8Weights(has_head=False)
    assert quantized_weights(INT8_PER_OUTPUT) == Int8Weights(has_head=False)
    assert quantized_weights(with_group(input_activations=None)) == Int8Weights(has_head=False)
    assert quantized_weights(W8A8 | {"ignore": ["re:.*lm_head"]}) == Int8Weights(has_head=False)
    assert quantized_weights(W8A8 | {"format": "pack-quantized"}) == Int8Weights(has_head=False, is_packed=True)
    assert quantized_weights(with_group(format="int-quantized")) == Int8Weights(has_head=False)
    assert quantized_weights(W8A8 | {"ignore": []}) == Int8Weights(has_head=True)


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ([], None),
        ("int8", ""),
        ({"quant_method": "gptq", "bits": 4}, ".desc_act"),
        ({"quant_method": "bitsandbytes"}, ".quant_method"),
        (W8A8 | {"format": "float-quantized"}, ".config_groups.group_0.weights.type"),
        (W8A8 | {"format": "marlin-24"}, ".format"),
        (W8A8 | {"format": None}, ".format"),
        (W8A8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ".sparsity_config"),
        (W8A8 | {"transform_config": {"config_groups": {"u": {}}}}, ".transform_config"),
        (W8A8 | {"kv_cache_scheme": {"num_bits": 8}}, ".kv_cache_scheme"),
        (W8A8 | {"config_groups": None}, ".config_groups"),
        (W8A8 | {"config_groups": {"a": GROUP, "b": GROUP}}, ".config_groups"),
        (W8A8 | {"config_groups": {"a": "W8A8"}}, ".config_groups.a"),
        (W8A8 | {"ignore": [3]}, ".ignore"),
        (with_group(targets=["Linear", "Embedding"]), ".config_groups.group_0.targets"),
        (with_group(output_activations=WEIGHTS), ".config_groups.group_0.output_activations"),
        (with_group(format="pack-quantized"), ".config_groups.group_0.format"),
        (with_group(weights=None), ".config_groups.group_0.weights"),
        (with_group(weights=WEIGHTS | {"num_bits": 4}), ".config_groups.group_0.weights.num_bits"),
        (with_group(weights=WEIGHTS | {"type": "float"}), ".config_groups.group_0.weights.type"),
        (with_group(weights=WEIGHTS | {"symmetric": False}), ".config_groups.group_0.weights.symmetric"),
        (with_group(weights=WEIGHTS | {"symmetric": 1}), ".config_groups.group_0.weights.symmetric"),
        (with_group(weights=WEIGHTS | {"strategy": "group"}), ".config_groups.group_0.weights.strategy"),
        (with_group(input_activations=WEIGHTS), ".config_groups.group_0.input_activations.strategy"),
    ],
)
def test_other_quantization_is_refused_by_field(quantization: Any, field: str | None) -> None:
    if field is None:
        assert quantized_weights(quantization) is None
        return
    with pytest.raises(UnsupportedModel) as refused:
        read_config(LLAMA | {"quantization_config": quantization})
    assert refused.value.field == f"quantization_config{field}"


def test_scales_follow_their_weights_and_fused_weights_stay_adjacent() -> None:
    config = read_config(LLAMA | {"quantization_config": W8A8})
    _, layer, last = tensors_by_segment(config)
    linear = [slot for slot in layer if "norm" not in slot.name]
    names = [slot.name.removeprefix("model.layers.0.") for slot in linear]
    assert names[:7] == [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.q_proj.weight_scale",
        "self_attn.k_proj.weight_scale",
        "self_attn.v_proj.weight_scale",
        "self_attn.o_proj.weight",
    ]
    for slot in linear:
        assert slot.is_scale == slot.name.endswith("_scale") and slot.dtype == ("" if slot.is_scale else "I8")
    assert {slot.shape for slot in linear if slot.is_scale} == {(64, 1), (32, 1), (96, 1)}
    assert [slot.dtype for slot in last] == ["", ""]
    *_, last = tensors_by_segment(read_config(LLAMA | {"quantization_config": W8A8 | {"ignore": []}}))
    assert [(slot.group, slot.dtype) for slot in last] == [("norm", ""), ("head", "I8"), ("head_scales", "")]


AWQ, GPTQ, FP8 = FORMATS["awq"].config, FORMATS["gptq"].config, FORMATS["fp8"].config
PACKED: dict[str, Any] = dict(FORMATS["w4a16"].config)
INT4 = PACKED["config_groups"]["group_0"]["weights"]


def read(quantization: Any) -> Any:
    return read_config(LLAMA | {"quantization_config": quantization})


def packed(**weights: Any) -> dict[str, Any]:
    group = {**PACKED["config_groups"]["group_0"], "weights": {**INT4, **weights}}
    return PACKED | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("name", "stored", "endings"),
    [
        ("awq", "I4", {"qweight": (64, 12), "qzeros": (2, 12), "scales": (2, 96)}),
        ("gptq", "I4", {"qweight": (8, 96), "qzeros": (2, 12), "scales": (2, 96), "g_idx": (64,)}),
        ("w4a16", "I4", {"weight_packed": (96, 8), "weight_scale": (96, 2), "weight_shape": (2,)}),
        ("fp8", "F8_E4M3", {"weight": (96, 64), "weight_scale": (1,)}),
        ("fp8-blocks", "F8_E4M3", {"weight": (96, 64), "weight_scale_inv": (1, 1)}),
        ("fp8-channels", "F8_E4M3", {"weight": (96, 64), "weight_scale": (96, 1)}),
    ],
)
def test_tensors_of_a_layer_follow_from_the_config(name: str, stored: str, endings: dict[str, Any]) -> None:
    config = read(dict(FORMATS[name].config))
    assert config.needed_engine == "vllm" and config.vllm.stored == stored
    assert {part.ending: part.shape for part in config.vllm.parts(96, 64)} == endings


def test_static_activations_have_a_scale_and_leave_int8_to_vllm() -> None:
    static = WEIGHTS | {"strategy": "tensor"}
    config = read(W8A8 | {"config_groups": {"group_0": GROUP | {"input_activations": static}}})
    assert (config.needed_engine, config.int8) == ("vllm", None)
    assert [part.ending for part in config.vllm.parts(96, 64)] == ["weight", "weight_scale", "input_scale"]
    assert read(W8A8).needed_engine == "torchrelay" and read(None).needed_engine == ""


def test_only_what_was_checked_reaches_vllm() -> None:
    document = read({**AWQ, "backend": "autoawq", "dynamic": {"+:(a+)+$": {}}, "group_size": -1}).vllm.document
    assert document == {**AWQ, "group_size": -1, "modules_to_not_convert": []}


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({**AWQ, "bits": 8}, "bits"),
        ({**AWQ, "bits": True}, "bits"),
        ({**AWQ, "version": "gemv"}, "version"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ({**AWQ, "group_size": 0}, "group_size"),
        ({**AWQ, "group_size": 2**40}, "group_size"),
        ({**AWQ, "modules_to_not_convert": ["a b"]}, "modules_to_not_convert"),
        ({**AWQ, "modules_to_not_convert": ["a"] * 5000}, "modules_to_not_convert"),
        ({**GPTQ, "desc_act": True}, "desc_act"),
        ({**GPTQ, "sym": False}, "sym"),
        ({**GPTQ, "dynamic": {"+:(a+)+$": {"bits": 8}}}, "dynamic"),
        ({**GPTQ, "lm_head": "yes"}, "lm_head"),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, "checkpoint_format"),
        ({**FP8, "activation_scheme": "none"}, "activation_scheme"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size"),
        (packed(num_bits=3), "config_groups.group_0.weights.num_bits"),
        (packed(group_size=-1), "config_groups.group_0.weights.group_size"),
        (packed(symmetric=False), "config_groups.group_0.weights.symmetric"),
        (packed(actorder="group"), "config_groups.group_0.weights.actorder"),
        (PACKED | {"ignore": ["re:(a+)+$"]}, "ignore"),
        (PACKED | {"ignore": ["re:.*a.*b.*c.*d"]}, "ignore"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"quant_method": "torchao"}, "quant_method"),
    ],
)
def test_hostile_and_unknown_configs_are_refused_by_field(quantization: Any, field: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read(quantization)
    assert refused.value.field == f"quantization_config.{field}"


def test_values_in_refusals_are_json() -> None:
    for change, said in (
        ({"checkpoint_format": "gptq_v2"}, "'gptq_v2' is not supported; supported are null and 'gptq'"),
        ({"desc_act": True}, "desc_act true is not supported; supported is false"),
        ({"desc_act": None}, "desc_act null is not supported"),
    ):
        with pytest.raises(UnsupportedModel, match=said):
            read({**GPTQ, **change})


def test_simple_patterns_of_ignored_layers_are_kept() -> None:
    patterns = ["lm_head", "re:.*lm_head", r"re:model\.layers\.\d.*", "re:^visual.*$"]
    assert read(PACKED | {"ignore": patterns}).vllm.document["ignore"] == patterns


def test_a_layer_that_does_not_divide_into_groups_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="a layer of 80 does not divide into parts of 32") as refused:
        read(dict(AWQ)).vllm.parts(96, 80)
    assert refused.value.field == "quantization_config.group_size"
