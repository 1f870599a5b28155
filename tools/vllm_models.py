"""Writes what the installed vLLM knows to libs/modelspec: its architectures, and the keys of config.json that it reads.

    tests/vllm/.venv/bin/python tools/vllm_models.py

A key counts as read if a config class of transformers for one of the models of text has it, or if vLLM's code for these
models, or its code that reads configs, takes it from a config. Left out are keys that name other files, models or code,
and what a config has that is no field of it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from inspect import getfile, signature
from pathlib import Path
from typing import Any

import vllm
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.models import registry, supports_lora, supports_multimodal
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from torchrelay.modelspec.text_part import MULTIMODAL

OUTPUT = Path(__file__).resolve().parents[1] / "libs/modelspec/src/torchrelay/modelspec/vllm_models.json"
READERS = (
    "model_executor/layers/pooler/activations.py",
    "model_executor/layers/rotary_embedding/__init__.py",
    "model_executor/models/config.py",
    "model_executor/models/utils.py",
    "transformers_utils/config.py",
    "transformers_utils/model_arch_config_convertor.py",
    "config/model.py",
)
OWN_CONFIGS = "transformers_utils/configs"
CONFIGS = re.compile(r"(hf_|text_|hf_text_|rope_|yarn_)?(config|parameters|scaling)|kwargs")
IMAGE_MODELS = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
CLASSES = (
    IMAGE_MODELS,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
CLASSIFIER = "ForSequenceClassification"
# What these give is no vector of the hidden size, depends on other files, or is pooled as their config.json alone says.
LEFT_OUT = frozenset(
    (
        "BertForMaskedLM",
        "BertSpladeSparseEmbeddingModel",
        "BgeM3EmbeddingModel",
        "JinaEmbeddingsV5Model",
        "LlamaBidirectionalForSequenceClassification",
        "LlamaBidirectionalModel",
        "Terratorch",
        "VoyageQwen3BidirectionalEmbedModel",
    )
)
BIDIRECTIONAL = frozenset(("PaliGemmaForConditionalGeneration",))  # in prompts, as its text part alone is not
KEY = re.compile(r"[a-z][A-Za-z0-9_]{1,63}")
REFUSED = re.compile(
    r"(.*_)?(backbone|class|code|compression|custom|draft|file|map|modules?|name|path|peft|plan|processor|quantization"
    r"|quantized?|remote|speculative|speculators|tokenizer|weights)(_.*)?"
)
ALLOWED = frozenset(("text_config", "vision_config", "model_type", "architectures", "torch_dtype", "dtype"))


def keys_of_source(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=key) if _is_config(owner):
                yield key
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str(key)), *_]):
                if _is_config(owner):
                    yield key
            case ast.Call(func=ast.Attribute(value=owner, attr="get" | "pop"), args=[ast.Constant(value=str(key)), *_]):
                if _is_config(owner):
                    yield key
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))) if _is_config(owner):
                yield key


def _is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return CONFIGS.fullmatch(name) is not None


def keys_of_transformers(architectures: set[str]) -> Iterator[str]:
    for model_type, kind in CONFIG_MAPPING.items():
        if architectures.isdisjoint(each.get(model_type) for each in CLASSES):
            continue
        for each in kind.__mro__[:-1]:
            yield from getattr(each, "__annotations__", ())
            yield from getattr(each, "attribute_map", ())
        yield from signature(kind.__init__).parameters
        yield from keys_of_source(ast.parse(Path(getfile(kind)).read_text()))


def keys_of_own_configs(tree: ast.AST) -> Iterator[str]:
    """The arguments and fields of vLLM's config classes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name="__init__", args=arguments):
                yield from (each.arg for each in (*arguments.args, *arguments.kwonlyargs))
            case ast.AnnAssign(target=ast.Name(id=key)):
                yield key


def architectures_with_adapters() -> Iterator[str]:
    for name in registry._TEXT_GENERATION_MODELS:
        kind = registry.ModelRegistry._try_load_model_cls(name)
        if kind is None or supports_lora(kind):  # None: it cannot be imported here, and vLLM decides
            yield name


def of_text(names: Iterable[str]) -> dict[str, Any]:
    """The models of these that take text alone, by name. No import fails here but those of image models."""
    kinds = {name: registry.ModelRegistry._try_load_model_cls(name) for name in sorted(names)}
    return {name: kind for name, kind in kinds.items() if kind is not None and not supports_multimodal(kind)}


def with_images() -> Iterator[str]:
    """Models of images and text whose config has their text part apart, and which can be imported here."""
    for model_type, name in IMAGE_MODELS.items():
        is_listed = name in registry._MULTIMODAL_MODELS.keys() - BIDIRECTIONAL - set(MULTIMODAL)
        if not is_listed or "text_config" not in sub_configs(model_type):
            continue
        if registry.ModelRegistry._try_load_model_cls(name) is not None:
            yield name


def sub_configs(model_type: str) -> dict[str, Any]:
    kind: type[PreTrainedConfig] | None = dict(CONFIG_MAPPING.items()).get(model_type)
    return {} if kind is None else kind.sub_configs


def models_document() -> dict[str, Any]:
    """The file's content for the installed vLLM."""
    root, text = Path(vllm.__file__).parent, registry._TEXT_GENERATION_MODELS
    embedders = of_text(registry._EMBEDDING_MODELS.keys() - text.keys() - LEFT_OUT)
    classifiers = of_text(registry._SEQUENCE_CLASSIFICATION_MODELS.keys() - LEFT_OUT)
    # vLLM makes these of models of text, with settings of their own.
    made = [name for name in MODELS_CONFIG_MAP if name.replace(CLASSIFIER, "ForCausalLM") in text.keys() - {name}]
    images = set(with_images())
    keys = set(keys_of_transformers({*text, *embedders, *classifiers, *made, *images}))
    paths = {root / reader for reader in READERS}
    listed = {**registry._EMBEDDING_MODELS, **registry._SEQUENCE_CLASSIFICATION_MODELS}
    for module, _ in (*text.values(), *(listed[name] for name in (*embedders, *classifiers))):  # some by full names
        name = module.removeprefix("vllm.") if module.startswith("vllm.") else f"model_executor.models.{module}"
        path = root.joinpath(*name.split("."))
        paths.update(path.rglob("*.py") if path.is_dir() else {path.with_suffix(".py")})
    for path in paths:
        keys.update(keys_of_source(ast.parse(path.read_text())))
    for path in (root / OWN_CONFIGS).rglob("*.py"):
        tree = ast.parse(path.read_text())
        keys.update(keys_of_source(tree), keys_of_own_configs(tree))
    methods = {*dir(PreTrainedConfig), *dir(dict), "self"} - {field.name for field in fields(PreTrainedConfig)}
    known = {key for key in keys - methods if KEY.fullmatch(key) and not REFUSED.fullmatch(key)}
    return {
        "version": vllm.__version__.partition("+")[0],
        "text": sorted(text),
        "adapters": sorted(architectures_with_adapters()),
        "embedders": sorted(embedders),
        "rerankers": sorted({*classifiers, *made}),
        "typed": [name for name, kind in classifiers.items() if "token_type_ids" in signature(kind.forward).parameters],
        "images": sorted(images),
        "multimodal": sorted(registry._MULTIMODAL_MODELS),
        "config_keys": sorted(known | ALLOWED),
    }


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(models_document(), indent=0) + "\n")
