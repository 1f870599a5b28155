"""Quantized weights, as quantization_config in config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.vllm_quantization import (
    COMPRESSED,
    CompressedLayers,
    VllmQuantization,
    compressed_layers,
    vllm_compressed,
    vllm_quantization,
)

_FIELD = "quantization_config"
_HEAD = "lm_head"
PACKED = "pack-quantized"
_FORMATS = ("int-quantized", PACKED)
_WEIGHTS: Mapping[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
# Activations that are quantized as they come are not quantized here, which is more exact.
_ACTIVATIONS: Mapping[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True}
INT8_PER_OUTPUT: Mapping[str, Any] = {
    "quant_method": COMPRESSED,
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
    if quantization.get("quant_method") != COMPRESSED:
        return vllm_quantization(quantization)
    layers = compressed_layers(quantization)
    return _int8_weights(layers) or vllm_compressed(layers)


def _int8_weights(layers: CompressedLayers) -> Int8Weights | None:
    """Symmetric int8 weights with one scale per output; None for others."""
    ignored = layers.config.get("ignore") or []
    is_int8 = (
        layers.stored in _FORMATS
        and _has(layers.weights, _WEIGHTS)
        and (layers.activations is None or _has(layers.activations, _ACTIVATIONS))
        and isinstance(ignored, list)
        and all(isinstance(entry, str) for entry in ignored)
    )
    if not is_int8:
        return None
    # Its patterns are not evaluated, as they come from tenants. Where other layers are left out, scales are missing.
    return Int8Weights(has_head=not any(_HEAD in entry for entry in ignored), is_packed=layers.stored == PACKED)


def _has(part: Any, values: Mapping[str, Any]) -> bool:
    return isinstance(part, Mapping) and all(
        part.get(key) == value and type(part.get(key)) is type(value) for key, value in values.items()
    )
