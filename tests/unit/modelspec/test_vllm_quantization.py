"""quantization_config of weights that vLLM computes: the tensors that follow from it, and refusals by field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.quantized_checkpoints import FORMATS
from tests.unit.modelspec.test_quantization import GROUP, LLAMA, W8A8, WEIGHTS
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.errors import UnsupportedModel

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


def test_simple_patterns_of_ignored_layers_are_kept() -> None:
    patterns = ["lm_head", "re:.*lm_head", r"re:model\.layers\.\d.*", "re:^visual.*$"]
    assert read(PACKED | {"ignore": patterns}).vllm.document["ignore"] == patterns


def test_a_layer_that_does_not_divide_into_groups_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="a layer of 80 does not divide into parts of 32") as refused:
        read(dict(AWQ)).vllm.parts(96, 80)
    assert refused.value.field == "quantization_config.group_size"
