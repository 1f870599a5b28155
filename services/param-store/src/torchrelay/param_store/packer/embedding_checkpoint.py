"""Checkpoints of models of embeddings, as they are saved without the part that generates tokens."""

from __future__ import annotations

from typing import Any, Final

from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.text_part import is_multimodal
from torchrelay.param_store.packer.core import StoredTensor

_PREFIX: Final = "model."
_EMBEDDINGS: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_UNUSED: Final = ("pooler.dense.", "embeddings.position_ids")


def served_tensors(config: ModelConfig, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by their names in the model that is served. A decoder's are those of a model that generates, with a
    prefix; an encoder's are those of a model without a head.
    """
    if config.architecture.encoder is not None:
        return _encoder_tensors(config.architecture.encoder.prefix, tensors)
    if _EMBEDDINGS not in tensors:
        return tensors
    return {name if name == _HEAD else _PREFIX + name: tensor for name, tensor in tensors.items()}


def _encoder_tensors(prefix: str, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Without the layer for sentence pairs and the numbers of positions, which no pooling uses. In a checkpoint with
    the prefix, tensors without it are of a head.
    """
    of_encoder = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    return {name: each for name, each in (of_encoder or tensors).items() if not name.startswith(_UNUSED)}


def without_missing_head(
    document: dict[str, Any], config: ModelConfig, tensors: dict[str, StoredTensor]
) -> dict[str, Any]:
    """config.json as it describes the tensors: it may name a head that was not saved, as Qwen3-Embedding-8B's does."""
    if config.tied_embeddings or _HEAD in tensors or is_multimodal(document):
        return document
    return {**document, "architectures": [config.architecture.headless_name]}
