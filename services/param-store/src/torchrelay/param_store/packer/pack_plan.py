"""The upload's tensors, checked against the config and laid out in execution order."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, TensorSpec, tensors_by_segment
from torchrelay.modelspec.text_part import is_multimodal, text_tensor_name
from torchrelay.param_store.packer.checkpoint import Checkpoint
from torchrelay.param_store.packer.core import PackPlan, PackRefused, StoredTensor, listed, quoted
from torchrelay.param_store.packer.quantized_tensors import quantized_tensors
from torchrelay.transfer.pack_layout import PackLayout

_OF_LAYER = re.compile(r"(model\.layers|encoder\.layer)\.\d+\.")
_BUFFER = re.compile(r"\.rotary_emb\.|\.masked_bias$")  # of older exports; they follow from the config


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


def plan_pack(config: ModelConfig, checkpoint: Checkpoint, declared_dtype: str | None) -> PackPlan:
    """Plans the pack, whose weights have one dtype: of a mixture ``declared_dtype``, which config.json gives, if some
    weights have it, or else the dtype of most numbers.

    Raises ``PackRefused`` for a tensor that is missing, has another shape than the config requires or a dtype that is
    not served, or would change what the model computes although the config does not mention it.
    """
    quantized = quantized_tensors(config, [tuple(slots) for slots in tensors_by_segment(config)], checkpoint)
    segments = quantized.segments
    slots = tuple(chain.from_iterable(segments))
    sources = tuple(_matching(slot, checkpoint) for slot in slots)
    pairs = list(zip(slots, sources, strict=True))
    weights = [source for slot, source in pairs if not slot.dtype and not slot.is_scale]
    scales = [source for slot, source in pairs if slot.is_scale]
    dtype = common_dtype(weights, declared_dtype)
    scale_dtype = common_dtype(scales, "F32") if scales else ""
    notes = [*checkpoint.notes, *_conversions(weights, dtype), *_conversions(scales, scale_dtype)]
    needed = {slot.name for slot in slots}
    zeros = {name: stored for name, stored in quantized.biases.items() if name not in needed}
    if unused := _unused(config, checkpoint.tensors, needed, zeros):
        notes.append(f"tensors that {config.architecture.name} does not use were left out: {listed(unused)}")

    def typed(slot: TensorSpec) -> TensorSpec:
        return replace(slot, dtype=slot.dtype or (scale_dtype if slot.is_scale else dtype))

    layout = PackLayout.of([[typed(slot) for slot in segment] for segment in segments], dtype)
    are_scales = frozenset(index for index, slot in enumerate(slots) if slot.is_scale or slot.name in quantized.scales)
    required = {
        index: quantized.required[slot.name] for index, slot in enumerate(slots) if slot.name in quantized.required
    }
    return PackPlan(layout, sources, tuple(notes), are_scales, required, tuple(zeros.values()))


def common_dtype(sources: Sequence[StoredTensor], preferred: str | None) -> str:
    """``preferred`` if a tensor has it, else the dtype of most numbers."""
    num_values = Counter[str]()
    for source in sources:
        num_values[source.dtype] += math.prod(source.shape)
    return preferred if preferred is not None and preferred in num_values else num_values.most_common(1)[0][0]


def _conversions(sources: Sequence[StoredTensor], dtype: str) -> list[str]:
    """A note for each dtype that is converted to ``dtype``."""
    others = sorted({source.dtype for source in sources} - {dtype})
    return [
        f"tensors of dtype {other} were converted to {dtype}: "
        + listed([source.name for source in sources if source.dtype == other])
        for other in others
    ]


def _matching(slot: TensorSpec, checkpoint: Checkpoint) -> StoredTensor:
    stored = checkpoint.tensors.get(slot.name)
    if stored is None:
        detail = f"tensor {quoted(slot.name)} is missing; config.json requires shape {slot.shape}"
        if below := next((name for name in checkpoint.tensors if text_tensor_name(name) == slot.name), None):
            detail += f". {quoted(below)} is of a multimodal model, which architectures in config.json must then name"
        raise PackRefused(checkpoint.file, detail)
    if stored.shape != slot.shape and not (slot.is_scale and stored.shape == slot.shape[:1]):
        detail = f"shape {stored.shape} differs from {slot.shape}, which config.json requires"
        raise PackRefused(stored.file, f"tensor {quoted(slot.name)}: {detail}")
    known = [slot.dtype] if slot.dtype else list(DTYPE_BYTES)
    if stored.dtype not in known:
        raise PackRefused(
            stored.file,
            f"tensor {quoted(slot.name)}: dtype {stored.dtype} is not supported; supported are {', '.join(known)}",
        )
    return stored


def _unused(
    config: ModelConfig, tensors: dict[str, StoredTensor], needed: set[str], zeros: Container[str]
) -> list[str]:
    """The tensors that the model does not need: buffers, other heads, other parts, ``zeros``.

    Raises ``PackRefused`` for a tensor of a layer, or of a module that the model has: the config does not describe
    the model whose weights these are.
    """
    modules = {name.rpartition(".")[0] for name in needed}
    unused = []
    for name, stored in tensors.items():
        if name in needed:
            continue
        is_served = name.rpartition(".")[0] in modules or _OF_LAYER.match(name)
        if is_served and name not in zeros and not _BUFFER.search(name):
            raise PackRefused(stored.file, f"tensor {quoted(stored.name)} is not part of {config.architecture.name}")
        unused.append(stored.name)
    return sorted(unused)
