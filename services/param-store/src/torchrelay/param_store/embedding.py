"""The embeddings that a model declares in the files of sentence-transformers.

modules.json lists what happens to a text: a transformer, the pooling of its hidden states, perhaps a normalization.
Without that file an encoder's embedding is the mean, not normalized, as in sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from torchrelay.control.v1 import types_pb2
from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.opaque import OpaqueModel
from torchrelay.param_store.model_files import MODULES, POOLING

_MODE: Final = "pooling_mode_"
_OF_ENCODERS: Final[dict[str, int]] = {
    f"{_MODE}mean_tokens": types_pb2.POOLING_MEAN,
    f"{_MODE}cls_token": types_pb2.POOLING_FIRST_TOKEN,
}
_OF_DECODERS: Final[dict[str, int]] = {f"{_MODE}lasttoken": types_pb2.POOLING_LAST_TOKEN}
_POOLINGS: Final = {  # by the kind of model; None: of an architecture of embeddings that only vLLM computes
    True: ("an encoder", _OF_ENCODERS),
    False: ("a decoder", _OF_DECODERS),
    None: ("this architecture", _OF_ENCODERS | _OF_DECODERS),
}
_PACKAGE: Final = "sentence_transformers."
_IS_NORMALIZED: Final = {  # by the kinds of modules
    ("Transformer", "Pooling"): False,
    ("Transformer", "Pooling", "Normalize"): True,
}
_PATHS: Final = {"Transformer": "", "Pooling": POOLING.partition("/")[0]}
T = TypeVar("T")


class EmbeddingSpec(msgspec.Struct, frozen=True):
    """The embedding of a text: its pooled hidden states, normalized to length 1 or as they are. Or a pair's score."""

    pooling: int  # a number of the protocol
    num_dimensions: int
    is_normalized: bool

    @property
    def pooling_name(self) -> str:
        """The pooling as a pack for vLLM names it."""
        return types_pb2.Pooling.Name(types_pb2.Pooling.ValueType(self.pooling)).removeprefix("POOLING_").lower()


class UnsupportedEmbedding(Exception):
    """The files declare an embedding that is not supported, or are not valid."""

    def __init__(self, file: str, detail: str) -> None:
        super().__init__(f"{file}: {detail}")
        self.file, self.detail = file, detail


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def model_embedding(read: Callable[[str], bytes | None], config: ModelConfig | OpaqueModel) -> EmbeddingSpec | None:
    """The embedding of a model, if it has any. ``read``: the content of a file of the model; None if it has none.

    Raises ``UnsupportedEmbedding``.
    """
    if isinstance(config, OpaqueModel) and config.is_reranker:
        return EmbeddingSpec(types_pb2.POOLING_SCORE, 1, False)
    is_encoder = None if isinstance(config, OpaqueModel) and config.is_embedder else config.encoder is not None
    return declared_embedding(read, config.hidden_size, is_encoder)


def declared_embedding(
    read: Callable[[str], bytes | None], hidden_size: int, is_encoder: bool | None
) -> EmbeddingSpec | None:
    """The embedding that the files declare. ``is_encoder``: None if any pooling will do. Raises as
    ``model_embedding``.
    """
    encoded = read(MODULES)
    if encoded is None:
        return EmbeddingSpec(types_pb2.POOLING_MEAN, hidden_size, False) if is_encoder else None
    is_normalized = _is_normalized(_decoded(MODULES, encoded, list[_Module]))
    pooling = read(POOLING)
    if pooling is None:
        raise UnsupportedEmbedding(POOLING, f"it is missing from the upload, although {MODULES} lists a Pooling")
    number = _pooling(_decoded(POOLING, pooling, dict[str, Any]), hidden_size, is_encoder)
    return EmbeddingSpec(number, hidden_size, is_normalized)


def _is_normalized(modules: list[_Module]) -> bool:
    kinds = tuple(module.type.rpartition(".")[2] for module in modules)
    if kinds not in _IS_NORMALIZED or not all(module.type.startswith(_PACKAGE) for module in modules):
        given = ", ".join(module.type for module in modules) or "none"
        raise UnsupportedEmbedding(
            MODULES,
            "the modules must be Transformer, Pooling and perhaps Normalize of sentence_transformers, not "
            f"{given}; without this file the model is published without embeddings",
        )
    for kind, module in zip(kinds, modules, strict=True):
        if kind in _PATHS and module.path != _PATHS[kind]:
            raise UnsupportedEmbedding(MODULES, f"the path of {kind} must be {_PATHS[kind]!r}, not {module.path!r}")
    return _IS_NORMALIZED[kinds]


def _pooling(pooling: dict[str, Any], hidden_size: int, is_encoder: bool | None) -> int:
    modes = [name for name, is_on in pooling.items() if name.startswith(_MODE) and is_on]
    kind, known = _POOLINGS[is_encoder]
    if len(modes) != 1 or modes[0] not in known:
        given = ", ".join(modes) or "none"
        raise UnsupportedEmbedding(POOLING, f"the pooling of {kind} must be {' or '.join(known)}, not {given}")
    size = pooling.get("word_embedding_dimension")
    if size != hidden_size:
        detail = f"word_embedding_dimension is {size!r}, and hidden_size in config.json {hidden_size}"
        raise UnsupportedEmbedding(POOLING, detail)
    return known[modes[0]]


def _decoded(file: str, encoded: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(encoded, type=kind)
    except RecursionError:
        raise UnsupportedEmbedding(file, "its JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnsupportedEmbedding(file, f"it is not valid: {error}") from None
