"""The model that `torchrelay size` is asked about: a folder, a repository of the hub, or a model of the platform."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.cli.api.model_source import Folder, ModelSource
from torchrelay.cli.errors import CliError
from torchrelay.cli.hub.name import hub_name
from torchrelay.modelspec.config import declared_dtype, read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.sizing.footprint import Footprint, footprint_of
from torchrelay.modelspec.sizing.roofline import LearnedSteps, LinearCost

_INDEX, _SINGLE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"


@dataclass(frozen=True, slots=True)
class Learned:
    """Step times of the platform's workers, and the KV pool of a slot."""

    steps: LearnedSteps
    kv_pool_bytes: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and what is known of it."""

    name: str
    footprint: Footprint
    has_files: bool  # the bytes of weights are those of files, instead of a sum of shapes
    dtype: str = ""
    int8_bytes: float | None = None  # of the weights, if the linear layers were in int8; None: they cannot be, or are
    learned: Learned | None = None
    hosts: Mapping[str, int] | None = None
    vocab_size: int = 0


def subject_of(text: str, revision: str | None, to_int8: bool, of_platform: Callable[[str], Subject | None]) -> Subject:
    """``of_platform`` returns the platform's model of a name, None if it has none; a path is never asked for there, nor
    what begins with hf://. Raises ``CliError``.
    """
    path = Path(text)
    is_path = path.exists() or text.startswith((".", "/", "~"))
    if not is_path and revision is None and not text.startswith("hf://"):
        if (subject := of_platform(text)) is not None:
            if to_int8:
                raise CliError(f"{text} is published already", "give its folder with --quantize, or leave that out")
            return subject
        if "/" not in text:
            raise CliError(f"{text} is neither a path here nor a model of the platform", "see: torchrelay models")
    hub = hub_name(text, revision)
    if hub is None:
        return _of_source(Folder(path), path.resolve().name, to_int8)
    from torchrelay.cli.hub.repository import HubRepository  # huggingface_hub takes a while to import

    return _of_source(HubRepository(hub), hub.repo.rpartition("/")[2], to_int8)


def subject_of_reply(reply: Mapping[str, Any]) -> Subject:
    """The subject that /v1/sizing describes."""
    learned, steps = None, reply["steps"]
    if steps:
        prefill, decode = LinearCost(**steps["prefill"]), LinearCost(**steps["decode"])
        learned = Learned(LearnedSteps(prefill, decode, steps["token_budget"], steps["origin"]), steps["kv_pool_bytes"])
    name, footprint = reply["model"], Footprint(**reply["footprint"])
    hosts, vocab_size = reply.get("hosts"), reply["vocab_size"]
    return Subject(name, footprint, True, learned=learned, hosts=hosts, vocab_size=vocab_size)


def _of_source(source: ModelSource, name: str, to_int8: bool) -> Subject:
    if _CONFIG not in source.sizes:
        raise CliError(f"{source} has no {_CONFIG}", source.advice())
    config, where = _document(source, _CONFIG), f"{source}/{_CONFIG}"
    weights_bytes = _weights_bytes(source)
    try:
        footprint = footprint_of(config, weights_bytes, to_int8=to_int8)
    except UnsupportedModel as error:
        raise CliError(f"{where}: {error}", f"the field is {error.field}; nothing was sized") from error
    try:
        if not read_config(config).has_head:
            hint = "torchrelay size is for models that generate tokens; embeddings have no decode steps"
            raise CliError(f"{where}: architectures: the model gives embeddings, not tokens", hint)
        int8_bytes = None if to_int8 else footprint_of(config, weights_bytes, to_int8=True).weights_bytes
    except UnsupportedModel:  # vLLM alone computes it, or it is quantized already
        int8_bytes = None
    dtype = "I8" if to_int8 else declared_dtype(config) or ""
    return Subject(name.lower(), footprint, weights_bytes > 0 and not to_int8, dtype, int8_bytes)


def _weights_bytes(source: ModelSource) -> int:
    """The bytes of tensors by the index of the shards, or of the single file; 0: there is neither."""
    if _INDEX in source.sizes:
        index = _document(source, _INDEX)
        metadata = index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int | float) and total > 0:
            return int(total)
        names = index.get("weight_map")
        return sum(source.sizes.get(each, 0) for each in set(names.values())) if isinstance(names, dict) else 0
    return source.sizes.get(_SINGLE, 0)


def _document(source: ModelSource, path: str) -> dict[str, Any]:
    try:
        document = json.loads(source.read(path))
    except (ValueError, RecursionError) as error:
        raise CliError(f"{source}/{path} is not valid JSON: {error}", "copy it again from its source") from error
    if not isinstance(document, dict):
        raise CliError(f"{source}/{path} is not a JSON object", "copy it again from its source")
    return document
