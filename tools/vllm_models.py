"""Writes what the installed vLLM knows to libs/modelspec: its architectures, and the keys of config.json that it reads.

    tests/vllm/.venv/bin/python tools/vllm_models.py

A key counts as read if code of vLLM takes an attribute of that name from a config, or if a config class of
transformers has it. Left out are keys that name other files, models or code.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.models import registry

OUTPUT = Path(__file__).resolve().parents[1] / "libs/modelspec/src/torchrelay/modelspec/vllm_models.json"
SOURCES = ("model_executor", "transformers_utils", "config", "v1/attention")
REFUSED = frozenset(
    (
        *("auto_map", "name_or_path", "_name_or_path", "quantization_config", "compression_config"),
        *("speculators_config", "draft_config", "backbone", "backbone_config", "backbone_kwargs"),
        *("use_pretrained_backbone", "use_timm_backbone", "custom_pipelines", "trust_remote_code", "code_revision"),
        *("transformers_weights", "peft_config", "tokenizer", "tokenizer_class", "tokenizer_file", "processor_class"),
        *("update", "get", "to_dict", "items", "keys", "pop", "copy", "values", "torch_dtype_str"),
    )
)


def keys_of_source(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=key) if _is_config(owner):
                yield key
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str(key)), *_]):
                if _is_config(owner):
                    yield key
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str(key)), *_]):
                yield key
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))):
                yield key


def _is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "self" or name.endswith(("config", "cfg"))


def keys_of_transformers() -> Iterator[str]:
    for model_type in CONFIG_MAPPING:
        try:
            kind = CONFIG_MAPPING[model_type]
        except (ImportError, AttributeError):  # of a model that needs a library that is not installed
            continue
        for each in kind.__mro__[:-1]:
            yield from getattr(each, "__annotations__", ())
        yield from inspect.signature(kind.__init__).parameters


def models_document() -> dict[str, Any]:
    """What the installed vLLM knows."""
    root = Path(vllm.__file__).parent
    keys = set(keys_of_transformers())
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            keys.update(keys_of_source(ast.parse(path.read_text())))
    read = sorted(key for key in keys - REFUSED if key.isidentifier() and len(key) <= 64 and not key.startswith("__"))
    return {
        "version": vllm.__version__.partition("+")[0],
        "text": sorted(registry._TEXT_GENERATION_MODELS),
        "multimodal": sorted(registry._MULTIMODAL_MODELS),
        "config_keys": read,
    }


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(models_document(), indent=0) + "\n")
