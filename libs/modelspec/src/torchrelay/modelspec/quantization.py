"""Quantized weights, as quantization_config in config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.vllm_quantization import VllmQuantization, vllm_quantization

_FIELD = "quantization_config"
_HEAD = "lm_head"
PACKED = "pack-quantized"
_FORMATS = ("int-quantized", PACKED)
_WEIGHTS: Mapping[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
# Activations that are quantized as they come are not quantized here, which is more exact.
_ACTIVATIONS: Mapping[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True}
# What would change the weights or their meaning, and its values that do not.
_ABSENT: Mapping[str, tuple[Any, ...]] = {
    "sparsity_config": (None, {}, {"format": "dense"}),
    "transform_config": (None, {}),
    "kv_cache_scheme": (None,),
}
INT8_PER_OUTPUT: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_WEIGHTS, "dynamic": False},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [_HEAD],
}


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """All linear layers have weights in int8 and a scale for each output; the head only with ``has_head``.

    Where ``is_packed``, the checkpoint has them as X_packed instead of X: each number plus 128, four to an int32.
    """

    has_head: bool
    is_packed: bool = False


def quantized_weights(quantization: Any) -> Int8Weights | VllmQuantization | None:
    """Reads a quantization_config; None without one. What Torchrelay's engine does not compute is vLLM's.

    Raises ``UnsupportedModel`` for what neither computes.
    """
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise UnsupportedModel("it must be an object", _FIELD)
    try:
        return int8_weights(quantization)
    except UnsupportedModel:
        return vllm_quantization(quantization)


def int8_weights(quantization: Mapping[str, Any]) -> Int8Weights:
    """Reads a quantization_config. Raises ``UnsupportedModel`` for anything but compressed-tensors with symmetric int8
    weights and one scale per output.
    """
    _require(quantization, {"quant_method": "compressed-tensors"}, _FIELD)
    stored = quantization.get("format")
    if stored not in _FORMATS:
        raise UnsupportedModel(
            f"format {stored!r:.80} is not supported; supported are {' and '.join(_FORMATS)}", f"{_FIELD}.format"
        )
    for key, harmless in _ABSENT.items():
        if quantization.get(key) not in harmless:
            raise UnsupportedModel(f"{key} is not supported", f"{_FIELD}.{key}")
    groups, field = quantization.get("config_groups"), f"{_FIELD}.config_groups"
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UnsupportedModel("it must be an object with one group, as all linear layers are treated alike", field)
    ((name, group),) = groups.items()
    field = f"{field}.{name}"
    if not isinstance(group, Mapping):
        raise UnsupportedModel("it must be an object", field)
    _require(group, {"targets": ["Linear"], "output_activations": None}, field)
    if "format" in group:
        _require(group, {"format": stored}, field)
    _require(group.get("weights"), _WEIGHTS, f"{field}.weights")
    if group.get("input_activations") is not None:
        _require(group["input_activations"], _ACTIVATIONS, f"{field}.input_activations")
    ignored = quantization.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(entry, str) for entry in ignored):
        raise UnsupportedModel("it must be a list of names", f"{_FIELD}.ignore")
    # Its patterns are not evaluated, as they come from tenants. Where other layers are left out, scales are missing.
    return Int8Weights(has_head=not any(_HEAD in entry for entry in ignored), is_packed=stored == PACKED)


def _require(part: Any, values: Mapping[str, Any], field: str) -> None:
    if not isinstance(part, Mapping):
        raise UnsupportedModel("it must be an object", field)
    for key, supported in values.items():
        if (value := part.get(key)) != supported or type(value) is not type(supported):
            raise UnsupportedModel(
                f"{key} {value!r:.80} is not supported; supported is {supported!r}", f"{field}.{key}"
            )
