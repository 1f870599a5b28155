"""Models that vLLM alone computes: what the platform itself reads of their config.json.

vLLM says which architectures it knows and which keys it reads; ``vllm_models.json`` keeps the answers of the version
that it names (``tools/vllm_models.py`` writes it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Final

from torchrelay.modelspec.config import MAX_LAYERS, ModelConfig, read_config
from torchrelay.modelspec.errors import UnsupportedModel, shown
from torchrelay.modelspec.quantization import quantized_weights
from torchrelay.modelspec.text_part import text_config
from torchrelay.modelspec.vllm_quantization import FIELD, VllmQuantization, layer_names

VLLM: Final = "vllm"
_MAX_NUMBER: Final = 2**31 - 1
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
MAX_CONTEXT_TOKENS: Final = 1 << 20  # vLLM makes tables of this length
_DEFAULT_CONTEXT_TOKENS: Final = 2048  # of a config that names none
# Keys of the packed config.json, beside those of the upload.
_POOLING: Final = "torchrelay_pooling"
_UNTYPED: Final = "torchrelay_untyped"  # the tokenizer gives no types of tokens
# Beneath a key that vLLM reads all keys count, but these, which name files, models or code.
_NESTED: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,63}")
_REFUSED: Final = re.compile(
    r"auto_map|attribute_map|.*_name_or_path|trust_remote_code|(quantization|compression)_config"
)
_ACTIVATIONS: Final = ("torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity")  # of scores
_OF_SEVERAL: Final = "single_label_classification"  # a label of several
_MXFP4: Final = "mxfp4"
_FP8: Final = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class KnownModels:
    """The architectures and keys that a version of vLLM knows."""

    version: str
    text: frozenset[str]  # architectures that generate from text alone
    adapters: frozenset[str]  # those of them that may have LoRA adapters
    embedders: frozenset[str]  # architectures that give embeddings of text alone
    rerankers: frozenset[str]  # classifiers of text, of which those of one label score pairs
    typed: frozenset[str]  # those of them that take types of tokens
    images: frozenset[str]  # architectures that take images too, and whose text part vLLM computes alone
    multimodal: frozenset[str]
    config_keys: frozenset[str]  # of config.json, and of its text_config


@cache
def known_models() -> KnownModels:
    document = json.loads((files(__package__) / "vllm_models.json").read_text())
    groups = {name: frozenset(names) for name, names in document.items() if isinstance(names, list)}
    return KnownModels(document["version"], **groups)


@dataclass(frozen=True, slots=True)
class OpaqueModel:
    """A model whose computation only vLLM knows. The sizes of KV are an upper bound: an architecture may keep less."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    quantization: Mapping[str, Any] | None  # with nothing but what was checked
    stored: str  # what the weights are, as shown to users; "": they have the model's dtype
    dtypes: tuple[str, ...]  # of its tensors, beside those of a model
    pooling: str  # that vLLM computes, as a pack names it; "": tokens, or what the upload's other files say

    needed_engine = VLLM
    encoder = None

    @property
    def has_head(self) -> bool:
        return not self.pooling

    @property
    def takes_images(self) -> bool:
        """Whether the architecture takes images, of which only the text part is served."""
        return self.architecture in known_models().images

    @property
    def is_embedder(self) -> bool:
        """Whether the architecture gives embeddings alone, of whatever pooling."""
        return self.architecture in known_models().embedders

    @property
    def is_reranker(self) -> bool:
        """Whether the architecture gives a score for a pair of texts alone."""
        return self.architecture in known_models().rerankers

    def weights_dtype(self, dtype: str) -> str:
        """The dtype of linear layers' weights, as users see it, in a model of ``dtype``."""
        return self.stored or dtype


def read_opaque(config: Mapping[str, Any]) -> OpaqueModel:
    """Reads a config.json, of whatever architecture. Raises ``UnsupportedModel``."""
    architecture = config["architectures"][0]
    text = _text_part(config) if architecture in known_models().images else text_config(config)
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head", "n_heads", default=1)
    quantization, stored, dtypes = _quantization(text.get(FIELD))
    context = _number(text, *_CONTEXT_KEYS, default=_DEFAULT_CONTEXT_TOKENS)
    if architecture in known_models().rerankers:
        _check_reranker(architecture, config)
    if "Roberta" in architecture:  # its positions begin after that of padding
        context -= _number(text, "pad_token_id", default=1, at_least=0) + 1
    return OpaqueModel(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=_number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers", at_most=MAX_LAYERS),
        num_kv_heads=_number(text, "num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=_number(text, "head_dim", default=max(hidden // heads, 1)),
        vocab_size=_number(text, "vocab_size", "padded_vocab_size"),
        max_context_tokens=min(context, MAX_CONTEXT_TOKENS),
        quantization=quantization,
        stored=stored,
        dtypes=dtypes,
        pooling=config.get(_POOLING, ""),
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part of a model of images, with the quantization of the whole."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModel(f"text_config must be an object, not {shown(text)}", "text_config")
    return {**text, FIELD: config[FIELD]} if config.get(FIELD) else text


def pooled_document(config: Mapping[str, Any], pooling: str, *, is_typed: bool = True) -> dict[str, Any]:
    """A config.json for a pack, which tells vLLM's slots what to compute; ``pooling``: "" for tokens."""
    document = {key: value for key, value in config.items() if key not in (_POOLING, _UNTYPED)}
    if not is_typed:
        document[_UNTYPED] = True
    return {**document, _POOLING: pooling} if pooling else document


def takes_token_types(architecture: str, packed: Mapping[str, Any]) -> bool:
    """Whether the tokens of a pair have types; ``packed``: the config.json of a pack of a reranker."""
    return not packed.get(_UNTYPED) and bool(num_token_types(architecture, packed) > 1)


def _check_reranker(architecture: str, config: Mapping[str, Any]) -> None:
    """Raises ``UnsupportedModel`` for a classifier that gives a pair no score, or whose score vLLM does not compute."""
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, Mapping) else 2  # as transformers has it
    if num_labels != 1:
        detail = f"a classifier is served as a reranker if it has one label; this one has {num_labels}"
        raise UnsupportedModel(detail, "id2label")
    if config.get("problem_type") == _OF_SEVERAL:
        raise UnsupportedModel(f"transformers refuses {_OF_SEVERAL} of one label", "problem_type")
    num_types = num_token_types(architecture, config)
    if type(num_types) is not int or (num_types > 1 and architecture not in known_models().typed):
        detail = f"vLLM gives the tokens of {architecture} no types, and this model has {shown(num_types)}"
        raise UnsupportedModel(detail, "type_vocab_size")
    field, saved = "sentence_transformers", config.get("sentence_transformers")
    activation = saved.get("activation_fn") if isinstance(saved, Mapping) else saved
    if activation is None:
        field = "sbert_ce_default_activation_function"
        activation = config.get(field)
    if activation not in (None, *_ACTIVATIONS):
        known = " or ".join(_ACTIVATIONS)
        raise UnsupportedModel(f"the activation of scores must be {known}, not {shown(activation)}", field)


def num_token_types(architecture: str, config: Mapping[str, Any]) -> Any:
    """The number of types of tokens, as transformers has it: 2 by default where there are any. It may be no number."""
    return config.get("type_vocab_size", 2 if architecture in known_models().typed else 1)


def check_known(config: Mapping[str, Any]) -> None:
    """Raises ``UnsupportedModel`` unless vLLM serves the architecture as a model of text."""
    names, known = config.get("architectures"), known_models()
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    served = known.text | known.embedders | known.rerankers | known.images
    if isinstance(name, str) and name in served:
        return
    detail = f"architecture {shown(name)} is not known, to vLLM {known.version} neither"
    if isinstance(name, str) and name in known.multimodal:
        detail = f"{name} takes more than text, and vLLM {known.version} does not compute its text part alone"
    elif isinstance(name, str) and (near := get_close_matches(name, sorted(served), 1)):
        detail += f"; the nearest that it knows is {near[0]}"
    raise UnsupportedModel(detail, "architectures")


def read_model(config: Mapping[str, Any], *, is_opaque: bool) -> ModelConfig | OpaqueModel:
    """The model of a pack. Raises ``UnsupportedModel``."""
    return read_opaque(config) if is_opaque else read_config(config)


def served_document(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json that vLLM receives: what it reads, except for the quantization, and a context of at
    most ``MAX_CONTEXT_TOKENS``.
    """
    document = {key: _plain(value) for key, value in config.items() if key in known_models().config_keys}
    if isinstance(text := config.get("text_config"), Mapping):
        document["text_config"] = served_document(text)
    for key in _CONTEXT_KEYS:
        if isinstance(value := document.get(key), int):
            document[key] = min(value, MAX_CONTEXT_TOKENS)
    return document


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of config.json that vLLM does not receive, without those of objects in it."""
    return sorted(config.keys() - known_models().config_keys - {FIELD})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = value.items()
        return {key: _plain(each) for key, each in items if _NESTED.fullmatch(key) and not _REFUSED.fullmatch(key)}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _number(
    config: Mapping[str, Any],
    *keys: str,
    default: int | None = None,
    at_least: int = 1,
    at_most: int = _MAX_NUMBER,
) -> int:
    """The first of the keys that config.json has: architectures spell them differently."""
    key = next((each for each in keys if config.get(each) is not None), keys[0])
    value = config.get(key, default)
    if type(value) is not int or not at_least <= value <= at_most:
        raise UnsupportedModel(f"{key} must be a whole number from {at_least} to {at_most:,}, not {shown(value)}", key)
    return value


def _quantization(quantization: Any) -> tuple[Mapping[str, Any] | None, str, tuple[str, ...]]:
    """The checked quantization_config, what it stores, and the dtypes of its tensors.

    GPTQ and packed formats are refused: kernels take some of their tensors for indexes, and whether these are right
    follows from layers that are not known here.
    """
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == _MXFP4:
        document = {
            "quant_method": _MXFP4,
            "modules_to_not_convert": layer_names(quantization, "modules_to_not_convert"),
        }
        return document, "MXFP4", ("U8",)
    parsed = quantized_weights(quantization)
    if parsed is None:
        return None, "", ()
    if isinstance(parsed, VllmQuantization) and (parsed.method == "awq" or parsed.stored == _FP8):
        return parsed.document, parsed.stored, (_FP8,) if parsed.stored == _FP8 else ("I32",)
    detail = f"of an architecture that only vLLM computes, weights may be quantized by awq, {_MXFP4} and in {_FP8}"
    raise UnsupportedModel(detail, f"{FIELD}.quant_method")
