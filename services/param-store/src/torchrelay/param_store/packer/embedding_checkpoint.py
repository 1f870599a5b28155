"""Checkpoints of models of embeddings, as they are saved without the part that generates tokens."""

from __future__ import annotations

from typing import Any, Final

from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.text_part import is_multimodal
from torchrelay.param_store.packer.core import StoredTensor

_PREFIX: Final = "model."
_EMBEDDINGS: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"


def prefixed_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by their names in a model that generates: without that part they are saved without a prefix."""
    if _EMBEDDINGS not in tensors:
        return tensors
    return {name if name == _HEAD else _PREFIX + name: tensor for name, tensor in tensors.items()}


def without_missing_head(
    document: dict[str, Any], config: ModelConfig, tensors: dict[str, StoredTensor]
) -> dict[str, Any]:
    """config.json as it describes the tensors: it may name a head that was not saved, as Qwen3-Embedding-8B's does."""
    if config.tied_embeddings or _HEAD in tensors or is_multimodal(document):
        return document
    return {**document, "architectures": [config.architecture.headless_name]}
