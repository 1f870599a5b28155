"""The files of a Hugging Face folder, or repository, that make up a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass

from torchrelay.cli.api.model_source import ModelSource, ProgressCallback
from torchrelay.cli.api.parallel import in_parallel
from torchrelay.cli.errors import CliError
from torchrelay.cli.left_out import left_out_note

_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_TOOL_TEMPLATE = f"{_TEMPLATES}/tool_use.jinja"
_DOCUMENTS = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        _TEMPLATE,
        "vocab.json",
        "merges.txt",
        "model.safetensors.index.json",
        "modules.json",
    }
)
_POOLING = "1_Pooling/config.json"  # beside modules.json: how texts are embedded
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model, as declared to the gateway."""

    path: str
    size: int
    sha256: str


def model_files(source: ModelSource, progress: ProgressCallback, *, is_adapter: bool = False) -> list[ModelFile]:
    """The files of the model, or of the adapter, with their digests. Raises ``CliError`` when the source is none."""
    paths, sizes = adapter_paths(source) if is_adapter else model_paths(source), source.sizes
    known = {path: source.sha256(path) for path in paths}
    total, done, lock = sum(sizes[path] for path in paths if known[path] is None), 0, threading.Lock()

    def file_of(path: str, check: Callable[[], None]) -> ModelFile:
        nonlocal done
        if sha256 := known[path]:
            return ModelFile(path, sizes[path], sha256)
        digest, size = hashlib.sha256(), 0
        for block in source.blocks(path):
            check()
            digest.update(block)
            size += len(block)
            with lock:
                done += len(block)
                progress("hash", done, total)
        return ModelFile(path, size, digest.hexdigest())

    return in_parallel(file_of, paths)


def adapter_paths(source: ModelSource) -> list[str]:
    """The files of a LoRA adapter, as PEFT saves it. Raises ``CliError`` when the source is not an adapter."""
    sizes = source.sizes
    if missing := next((name for name in _ADAPTER if name not in sizes), None):
        raise CliError(f"{source} has no {missing}", "give the folder of a LoRA adapter, or leave out --base")
    return list(_ADAPTER)


def model_paths(source: ModelSource) -> list[str]:
    """The model's files by name. Raises ``CliError`` when the source is not a model."""
    sizes = source.sizes
    names = {path for path in sizes if "/" not in path}
    if "config.json" not in names and _ADAPTER[0] in names:
        raise CliError(f"{source} is a LoRA adapter", "name the model that it adapts: --base NAME")
    if "config.json" not in names:
        raise CliError(f"{source} has no config.json", source.advice())
    if "tokenizer.json" not in names:
        raise CliError(
            f"{source} has no tokenizer.json",
            "save a fast tokenizer into it: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)",
        )
    weights = _weights(source, names)
    if not weights:
        raise CliError(
            f"{source} has no safetensors weights (model.safetensors, or shards with {_INDEX})",
            "save the model as safetensors: model.save_pretrained(FOLDER, safe_serialization=True)",
        )
    beneath = ([_POOLING] if "modules.json" in names else []) + [_TOOL_TEMPLATE]
    return sorted(names & (_DOCUMENTS | weights)) + [path for path in beneath if path in sizes]


def _weights(source: ModelSource, present: set[str]) -> set[str]:
    """The files with weights: those that the index names, or else the single one. Raises ``CliError``."""
    if _INDEX not in present:
        return {_SINGLE} & present
    try:
        names = set(json.loads(source.read(_INDEX))["weight_map"].values())
        missing = sorted(names - present)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CliError(f"{source}/{_INDEX} is not an index of weights", "copy it again from its source") from error
    if missing and _SINGLE in present and not names & present:
        return {_SINGLE}  # into which the shards that the index names were merged
    if missing:
        raise CliError(f"{source} has no {missing[0]}, which {_INDEX} names", "download it again")
    return names


def left_out(source: ModelSource, *, is_adapter: bool) -> list[str]:
    """A sentence for each group of files of the source that are not sent although other programs use them."""
    sizes = source.sizes
    templates = sorted(path for path in sizes if path.startswith(f"{_TEMPLATES}/") and path.endswith(".jinja"))
    if is_adapter:
        names = [name for name in ("tokenizer.json", "tokenizer_config.json", _TEMPLATE) if name in sizes]
        return left_out_note(names + templates, "an adapter has the tokenizer and the chat template of its base")
    return left_out_note([name for name in templates if name != _TOOL_TEMPLATE])


def has_chat_template(source: ModelSource) -> bool:
    """Whether the model has a chat template, in any of the files that may carry it."""
    sizes = source.sizes
    if _TEMPLATE in sizes or "tokenizer_config.json" not in sizes:
        return _TEMPLATE in sizes
    try:
        return bool(json.loads(source.read("tokenizer_config.json")).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
