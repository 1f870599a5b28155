"""The config.json that vLLM reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.opaque import read_opaque, served_document
from torchrelay.transfer.manifest import Manifest

# vLLM looks for a quantization under both, in the text part too.
_QUANTIZATION = ("quantization_config", "compression_config")


def model_document(manifest: Manifest) -> dict[str, Any]:
    """A tenant's config.json, whose quantization has nothing but what was checked at upload; of an opaque model only
    the keys that vLLM reads.
    """
    if manifest.is_opaque:
        quantization = read_opaque(manifest.config).quantization
        return _with(served_document(manifest.config), quantization)
    vllm = read_config(manifest.config).vllm
    return _with(manifest.config, None if vllm is None else vllm.document)


def _with(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    document = {key: value for key, value in config.items() if key not in _QUANTIZATION}
    if isinstance(text := document.get("text_config"), Mapping):
        document["text_config"] = {key: value for key, value in text.items() if key not in _QUANTIZATION}
    return document if quantization is None else document | {"quantization_config": dict(quantization)}
