"""The upload's tensors in the order of their files, for an engine that alone knows what they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from torchrelay.modelspec.opaque import OpaqueModel, unread_keys
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, TensorSpec
from torchrelay.param_store.packer.checkpoint import Checkpoint
from torchrelay.param_store.packer.core import PackPlan, PackRefused, StoredTensor, listed, quoted
from torchrelay.param_store.packer.pack_plan import common_dtype
from torchrelay.transfer.pack_layout import PackLayout

_NOTE: Final = (
    "only the engine vllm computes this architecture: an instance answers once all of it is loaded, and its prompts and"
    " answers do not move to other instances"
)
_EMBEDS_ALONE: Final = "with its embeddings declared, the model gives these alone: vLLM computes either them or tokens"
_TEXT_ALONE: Final = "of this model of images and text only the text part is served: requests with images are refused"
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,256}")


def plan_opaque(
    model: OpaqueModel,
    document: dict[str, Any],
    checkpoint: Checkpoint,
    declared_dtype: str | None,
    *,
    embeds: bool = False,
) -> PackPlan:
    """Plans the pack. Tensors of dtypes that neither the model nor its quantization has are left out: the buffers of
    older exports, for example. The engine misses what it needs and does not get.

    Raises ``PackRefused`` for a name that no framework gives, and for an upload without weights.
    """
    known, ordered = (*DTYPE_BYTES, *model.dtypes), list[StoredTensor]()
    for stored in checkpoint.tensors.values():
        if _NAME.fullmatch(stored.name) is None:
            detail = f"tensor {quoted(stored.name)}: its name is not 1 to 256 letters, digits, '_', '.' and '-'"
            raise PackRefused(stored.file, detail)
        if stored.dtype in known:
            ordered.append(stored)
    ordered.sort(key=lambda stored: (stored.file, stored.offset))
    weights = [stored for stored in ordered if stored.dtype in DTYPE_BYTES]
    if not weights:
        raise PackRefused(checkpoint.file, f"no tensor has one of the dtypes {', '.join(DTYPE_BYTES)}")
    is_alone = model.is_embedder or model.is_reranker
    notes = [*checkpoint.notes, _NOTE, *([_EMBEDS_ALONE] if embeds and not is_alone else [])]
    if model.takes_images:
        notes.append(_TEXT_ALONE)
    if left_out := sorted(checkpoint.tensors.keys() - {stored.name for stored in ordered}):
        notes.append(f"tensors of other dtypes than {', '.join(known)} were left out: {listed(left_out)}")
    if unread := unread_keys(document):
        notes.append(f"keys of config.json that vLLM does not read are not handed to it: {listed(unread)}")
    segments = _segments(ordered, model.num_layers + 2)
    return PackPlan(PackLayout.of(segments, common_dtype(weights, declared_dtype)), tuple(ordered), tuple(notes))


def _segments(ordered: Sequence[StoredTensor], num_segments: int) -> list[list[TensorSpec]]:
    """Runs of tensors with about as many bytes each; a large tensor may leave others empty."""
    total = sum(stored.num_bytes for stored in ordered)
    segments: list[list[TensorSpec]] = [[] for _ in range(num_segments)]
    position = 0
    for stored in ordered:
        segment = position * num_segments // max(total, 1)
        segments[min(segment, num_segments - 1)].append(
            TensorSpec(stored.name, stored.shape, stored.name, stored.dtype)
        )
        position += stored.num_bytes
    return segments
