"""The layout of a checkpoint's tensors in execution order."""

from __future__ import annotations

from itertools import groupby

from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, TensorSpec, tensors_by_segment
from torchrelay.param_store.packer.core import PackPlan, PackRefused, StoredTensor, quoted
from torchrelay.transfer.manifest import PAGE_BYTES, Segment, TensorEntry

GROUP_ALIGN_BYTES = 64


def plan_pack(config: ModelConfig, tensors: dict[str, StoredTensor], weights_file: str) -> PackPlan:
    """Plans the offset of each tensor. Segments and the pack's end are page aligned, groups aligned to 64 bytes.

    ``weights_file`` is named in the refusal of a missing tensor. Raises ``PackRefused`` for a tensor that is missing,
    has another shape or dtype than the config requires, or is unknown to the architecture.
    """
    entries: list[TensorEntry] = []
    sources: list[StoredTensor] = []
    segments: list[Segment] = []
    position = 0
    for slots in tensors_by_segment(config):
        position = begin = _aligned(position, PAGE_BYTES)
        for _, group in groupby(slots, key=lambda slot: slot.group):
            position = _aligned(position, GROUP_ALIGN_BYTES)
            for slot in group:
                source = _matching(slot, tensors, sources, weights_file)
                entries.append(TensorEntry(slot.name, slot.shape, source.dtype, position, source.num_bytes))
                sources.append(source)
                position += source.num_bytes
        segments.append(Segment(begin, position))
    _refuse_surplus(config, tensors, {entry.name for entry in entries})
    num_bytes = _aligned(position, PAGE_BYTES)
    return PackPlan(sources[0].dtype, tuple(entries), tuple(sources), tuple(segments), num_bytes)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _matching(
    slot: TensorSpec, tensors: dict[str, StoredTensor], before: list[StoredTensor], weights_file: str
) -> StoredTensor:
    stored = tensors.get(slot.name)
    if stored is None:
        raise PackRefused(
            weights_file, f"tensor {quoted(slot.name)} is missing; config.json requires shape {slot.shape}"
        )
    if stored.shape != slot.shape:
        detail = f"shape {stored.shape} differs from {slot.shape}, which config.json requires"
        raise PackRefused(stored.file, f"tensor {quoted(slot.name)}: {detail}")
    if stored.dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise PackRefused(
            stored.file, f"tensor {quoted(slot.name)}: dtype {stored.dtype} is not supported; supported are {known}"
        )
    if before and stored.dtype != before[0].dtype:
        detail = f"dtype {stored.dtype} differs from {before[0].dtype} of {before[0].name}; all weights must share one"
        raise PackRefused(stored.file, f"tensor {quoted(slot.name)}: {detail}")
    return stored


def _refuse_surplus(config: ModelConfig, tensors: dict[str, StoredTensor], needed: set[str]) -> None:
    for name, stored in tensors.items():
        # Older exports contain the rotary frequencies and a copy of a tied head, which can both be derived.
        harmless = name.endswith(".rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")
        if name not in needed and not harmless:
            raise PackRefused(stored.file, f"tensor {quoted(name)} is not part of {config.architecture.name}")
