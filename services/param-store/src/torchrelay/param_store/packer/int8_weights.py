"""Weights that are quantized to int8 as they are packed: a scale for each output, as compressed-tensors has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchrelay.modelspec.config import ModelConfig, read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.opaque import VLLM, OpaqueModel
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT
from torchrelay.modelspec.tensor_order import DTYPE_BYTES, tensors_by_segment
from torchrelay.param_store.packer.core import QUANTIZE, PackRefused, StoredTensor, quoted

BLOCK_VALUES: Final = 1 << 18  # that are quantized at a time; a block has whole rows, and a row at most so many
_LARGEST: Final = 127  # the scale of an output is its largest weight over this


def int8_config(
    document: dict[str, Any], config: ModelConfig | OpaqueModel
) -> tuple[dict[str, Any], ModelConfig | OpaqueModel]:
    """config.json with int8 weights, and the model that it then describes. Raises ``PackRefused``."""
    if isinstance(config, OpaqueModel):
        raise PackRefused(QUANTIZE, f"only weights that Torchrelay's engine computes can be, and {VLLM} computes these")
    if config.int8 is not None or config.vllm is not None:
        raise PackRefused(QUANTIZE, "quantization_config: the weights are quantized already")
    document = document | {"quantization_config": INT8_PER_OUTPUT}
    try:
        return document, read_config(document)
    except UnsupportedModel as error:
        raise PackRefused(QUANTIZE, f"{error.field}: {error}") from None


def quantized_to_int8(config: ModelConfig, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with the int8 form of each linear layer's weight, and its scales. Raises ``PackRefused`` for a weight
    that has none.
    """
    quantized = dict(tensors)
    for name in (slot.name for slots in tensors_by_segment(config) for slot in slots if slot.dtype == "I8"):
        weight = tensors.get(name)
        if weight is None:
            continue  # the plan refuses it by name
        shape = weight.shape
        if weight.dtype not in DTYPE_BYTES or len(shape) != 2 or 0 in shape or shape[1] > BLOCK_VALUES:
            detail = f"a weight of {weight.dtype} and shape {list(shape)} cannot be quantized"
            raise PackRefused(weight.file, f"tensor {quoted(weight.name)}: {detail}")
        if scale := tensors.get(f"{name}_scale"):
            raise PackRefused(scale.file, f"tensor {quoted(scale.name)}: only weights that are quantized have scales")
        quantized[name] = replace(weight, dtype="I8", weight=weight)
        quantized[f"{name}_scale"] = replace(weight, dtype="F32", shape=(shape[0], 1), weight=weight)
    return quantized


def int8_of(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """[out, in] finite weights as int8 numbers and a scale for each output."""
    scales = np.abs(values).max(axis=1) / np.float32(_LARGEST)
    scales[scales == 0] = 1  # of an output whose weights are all zero
    return np.rint(values / scales[:, None]).clip(-_LARGEST, _LARGEST).astype(np.int8), scales
