"""The tensors of linear layers that vLLM computes quantized, as quantization_config requires them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.plain_layers import PlainLayers, fused_name
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, TensorSpec
from torchrelay.modelspec.vllm_quantization import Part, Values, VllmQuantization
from torchrelay.param_store.model_files import CONFIG
from torchrelay.param_store.packer.checkpoint import Checkpoint
from torchrelay.param_store.packer.core import PackRefused, StoredTensor, quoted


@dataclass(slots=True)
class QuantizedTensors:
    """``scales`` are the names of tensors whose numbers must be positive, ``required`` the bytes of others. ``biases``
    are of quantized layers, and may be left out if they are zero.
    """

    segments: list[tuple[TensorSpec, ...]]
    scales: set[str] = field(default_factory=set)
    required: dict[str, bytes] = field(default_factory=dict)
    biases: dict[str, StoredTensor] = field(default_factory=dict)


def quantized_tensors(
    config: ModelConfig, segments: list[tuple[TensorSpec, ...]], checkpoint: Checkpoint
) -> QuantizedTensors:
    """The tensors with each quantized layer's parts instead of its weight; a layer that vLLM leaves plain keeps its
    weight. Raises ``PackRefused`` for a part that is missing or does not fit, and for a layer that the checkpoint
    stores quantized and vLLM leaves plain, or the other way round: vLLM would convert its numbers without a word.
    """
    planned = QuantizedTensors(segments)
    if config.vllm is not None:
        layers = _Layers(config.vllm, checkpoint, planned)
        planned.segments = [tuple(each for slot in slots for each in layers.tensors(slot)) for slots in segments]
    return planned


class _Layers:
    def __init__(self, quantization: VllmQuantization, checkpoint: Checkpoint, planned: QuantizedTensors) -> None:
        self._quantization, self._checkpoint, self._planned = quantization, checkpoint, planned
        self._plain = PlainLayers(quantization.document)
        self._fused: dict[str, tuple[str, bool]] = {}  # of each layer of vLLM the first weight, and whether it is plain
        self._indexes: dict[tuple[int, int], bytes] = {}

    def tensors(self, slot: TensorSpec) -> Iterator[TensorSpec]:
        if not slot.is_linear:
            yield slot
            return
        stem, (num_out, num_in) = slot.name.removesuffix("weight"), slot.shape
        stored = self._checkpoint.tensors
        if self._is_plain(slot):
            yield slot
            return
        try:
            parts = self._quantization.parts(num_out, num_in)
        except UnsupportedModel as error:
            raise PackRefused(CONFIG, f"{error.field}: {error}, as {quoted(slot.name)} needs") from None
        bias = stored.get(f"{stem}bias")
        fits = bias is not None and bias.shape == (num_out,) and bias.dtype in DTYPE_BYTES
        if bias is not None and fits and self._quantization.method == "gptq":
            self._planned.biases[f"{stem}bias"] = bias  # AutoGPTQ writes zeros for layers without a bias
        for part in parts:
            name = stem + part.ending
            tensor = _matching(name, part, stored, self._checkpoint.file)
            if part.values is Values.SCALES:
                self._planned.scales.add(name)
            elif part.values is Values.GROUPS:
                self._planned.required[name] = self._index(num_in, self._quantization.num_groups(num_in))
            elif part.values is Values.SHAPE:
                self._planned.required[name] = struct.pack("<2q", num_out, num_in)
            yield replace(slot, name=name, shape=tensor.shape, group=name, dtype=tensor.dtype, is_linear=False)

    def _is_plain(self, slot: TensorSpec) -> bool:
        """Whether the layer is plain. Raises ``PackRefused`` if the checkpoint or a part of the layer differs."""
        layer = slot.name.removesuffix(".weight")
        field, is_plain = self._plain.field(layer), self._plain.has(layer)
        tensor = self._checkpoint.tensors.get(slot.name)
        file = self._checkpoint.file if tensor is None else tensor.file
        is_stored_plain = tensor is not None and tensor.dtype in DTYPE_BYTES
        if is_plain and not is_stored_plain:
            known = ", ".join(DTYPE_BYTES)
            detail = f"by {field} its layer is not quantized, and it is stored in none of {known}"
            raise PackRefused(file, f"tensor {quoted(slot.name)}: {detail}")
        if tensor is not None and is_stored_plain and not is_plain:
            detail = f"it is stored in {tensor.dtype}, and by {field} its layer is quantized"
            raise PackRefused(file, f"tensor {quoted(slot.name)}: {detail}")
        first, is_first_plain = self._fused.setdefault(fused_name(layer), (slot.name, is_plain))
        if is_plain != is_first_plain:
            detail = f"vLLM computes it and {quoted(first)} as one layer, of which {field} names only a part"
            raise PackRefused(file, f"tensor {quoted(slot.name)}: {detail}")
        return is_plain

    def _index(self, num_in: int, num_groups: int) -> bytes:
        """The group of each input; layers of the same size share the bytes."""
        if (index := self._indexes.get((num_in, num_groups))) is None:
            size = num_in // num_groups
            index = self._indexes[num_in, num_groups] = struct.pack(
                f"<{num_in}i", *(at // size for at in range(num_in))
            )
        return index


def _matching(name: str, part: Part, stored: Mapping[str, StoredTensor], file: str) -> StoredTensor:
    tensor = stored.get(name)
    if tensor is None:
        raise PackRefused(file, f"tensor {quoted(name)} is missing; config.json requires shape {part.shape}")
    shapes = (part.shape, ()) if part.shape == (1,) else (part.shape,)
    if tensor.shape not in shapes:
        detail = f"shape {tensor.shape} differs from {part.shape}, which config.json requires"
        raise PackRefused(tensor.file, f"tensor {quoted(name)}: {detail}")
    known = [part.dtype] if part.dtype else list(DTYPE_BYTES)
    if tensor.dtype not in known:
        detail = f"dtype {tensor.dtype} is not supported; supported are {', '.join(known)}"
        raise PackRefused(tensor.file, f"tensor {quoted(name)}: {detail}")
    return tensor
