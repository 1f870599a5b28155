"""The upload's tensors, checked against the config and laid out in execution order."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, TensorSpec, tensors_by_segment
from torchrelay.modelspec.text_part import is_multimodal, text_tensor_name
from torchrelay.param_store.packer.core import PackPlan, PackRefused, StoredTensor, quoted
from torchrelay.transfer.pack_layout import PackLayout


def tensors_of_text(config: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by their names in the model that is served: of a multimodal checkpoint, those of its text part.

    Raises ``PackRefused`` if two have the same name there.
    """
    if not is_multimodal(config):
        return tensors
    named: dict[str, StoredTensor] = {}
    for stored in tensors.values():
        name = text_tensor_name(stored.name)
        if name is None:
            continue
        if name in named:
            raise PackRefused(stored.file, f"tensor {quoted(stored.name)} is the same as {quoted(named[name].name)}")
        named[name] = stored
    return named


def plan_pack(config: ModelConfig, tensors: dict[str, StoredTensor], weights_file: str) -> PackPlan:
    """Plans the pack. ``weights_file`` is named in the refusal of a missing tensor.

    Raises ``PackRefused`` for a tensor that is missing, has another shape or dtype than the config requires, or is
    unknown to the architecture.
    """
    sources: list[StoredTensor] = []
    alike: dict[str, StoredTensor] = {}  # the first of the weights in the model's dtype, and of the scales
    segments: list[list[TensorSpec]] = []
    for slots in tensors_by_segment(config):
        segments.append([])
        for slot in slots:
            sources.append(_matching(slot, tensors, alike, weights_file))
            segments[-1].append(replace(slot, dtype=sources[-1].dtype))
    _refuse_surplus(config, tensors, {slot.name for slot in chain.from_iterable(segments)})
    scales = frozenset(i for i, slot in enumerate(chain.from_iterable(segments)) if slot.is_scale)
    return PackPlan(PackLayout.of(segments, sources[0].dtype), tuple(sources), scales)


def _matching(
    slot: TensorSpec, tensors: dict[str, StoredTensor], alike: dict[str, StoredTensor], weights_file: str
) -> StoredTensor:
    stored = tensors.get(slot.name)
    if stored is None:
        detail = f"tensor {quoted(slot.name)} is missing; config.json requires shape {slot.shape}"
        if below := next((name for name in tensors if text_tensor_name(name) == slot.name), None):
            detail += f". {quoted(below)} is of a multimodal model, which architectures in config.json must then name"
        raise PackRefused(weights_file, detail)
    if stored.shape != slot.shape and not (slot.is_scale and stored.shape == slot.shape[:1]):
        detail = f"shape {stored.shape} differs from {slot.shape}, which config.json requires"
        raise PackRefused(stored.file, f"tensor {quoted(slot.name)}: {detail}")
    known = [slot.dtype] if slot.dtype else list(DTYPE_BYTES)
    if stored.dtype not in known:
        raise PackRefused(
            stored.file,
            f"tensor {quoted(slot.name)}: dtype {stored.dtype} is not supported; supported are {', '.join(known)}",
        )
    kind = slot.dtype or ("scales" if slot.is_scale else "weights")
    first = alike.setdefault(kind, stored)
    if stored.dtype != first.dtype:
        detail = f"dtype {stored.dtype} differs from {first.dtype} of {first.name}; all {kind} must share one"
        raise PackRefused(stored.file, f"tensor {quoted(slot.name)}: {detail}")
    return stored


def _refuse_surplus(config: ModelConfig, tensors: dict[str, StoredTensor], needed: set[str]) -> None:
    for name, stored in tensors.items():
        # Older exports contain the rotary frequencies and a copy of a tied head, which can both be derived.
        harmless = name.endswith(".rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")
        if name not in needed and not harmless:
            raise PackRefused(stored.file, f"tensor {quoted(stored.name)} is not part of {config.architecture.name}")
