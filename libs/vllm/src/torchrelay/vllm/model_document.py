"""The config.json that vLLM reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.modelspec.config import read_config

# vLLM looks for a quantization under both, in the text part too.
_QUANTIZATION = ("quantization_config", "compression_config")


def model_document(config: Mapping[str, Any]) -> dict[str, Any]:
    """A tenant's config.json, whose quantization has nothing but what was checked at upload."""
    document = {key: value for key, value in config.items() if key not in _QUANTIZATION}
    if isinstance(text := document.get("text_config"), Mapping):
        document["text_config"] = {key: value for key, value in text.items() if key not in _QUANTIZATION}
    if (quantization := read_config(config).vllm) is not None:
        document["quantization_config"] = dict(quantization.document)
    return document
