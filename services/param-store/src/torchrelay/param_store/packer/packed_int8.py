"""Weights that a checkpoint stores four to an int32, as compressed-tensors' format "pack-quantized" does for 8 bits.

In memory an int32 is the four numbers in order, each plus 128.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchrelay.modelspec.config import ModelConfig
from torchrelay.param_store.packer.core import StoredTensor

_PACKED, _SHAPE = "_packed", "_shape"
_OFFSET = 0x80


def unpacked_int8(config: ModelConfig, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, with each packed weight as the int8 weight that it holds. Shapes beside them are left out, as
    config.json determines them.
    """
    if config.int8 is None or not config.int8.is_packed:
        return tensors
    named: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        weight = name.removesuffix(_PACKED)
        if name == weight and name.removesuffix(_SHAPE) + _PACKED not in tensors:
            named[name] = stored
        elif name != weight and stored.dtype == "I32" and len(stored.shape) == 2:
            shape = stored.shape[0], 4 * stored.shape[1]
            named[weight] = replace(stored, dtype="I8", shape=shape, is_offset=True)
    return named


def remove_offset(numbers: memoryview) -> None:
    """Subtracts 128 from bytes, in place: what were 0 to 255 become int8 numbers."""
    view = np.frombuffer(numbers, np.uint8)
    np.bitwise_xor(view, _OFFSET, out=view)
