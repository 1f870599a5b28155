"""The weights of a LoRA adapter, beside those of its base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrelay.common.errors import DataCorrupted
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.kernels.low_rank import Adapter, LowRank
from torchrelay.engine.weights.pack_weights import TORCH_DTYPES
from torchrelay.modelspec.adapter import AdaptedMatrix, adapted_matrices
from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.errors import UnsupportedModel

_METADATA = "__metadata__"


def read_adapter(
    adapter_id: str, document: bytes, weights: bytes, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """An adapter of the model ``config`` from PEFT's two files, in the dtype of the model, on its device.

    The files were checked at upload. Raises ``DataCorrupted`` if they do not fit the model.
    """
    try:
        num_header_bytes = 8 + int.from_bytes(weights[:8], "little")
        header = json.loads(weights[8:num_header_bytes])
        header.pop(_METADATA, None)
        matrices = adapted_matrices(config, json.loads(document), set(header))
        body = as_tensor(memoryview(weights)[num_header_bytes:])
        layers: list[dict[str, tuple[LowRank, ...]]] = [{} for _ in range(config.num_layers)]
        for matrix in matrices:
            a, b = (_tensor(header[name], shape, body).to(device, dtype) for name, shape in matrix.tensors.items())
            before = layers[matrix.layer].get(matrix.group, ())
            layers[matrix.layer][matrix.group] = (*before, LowRank(a, b.t().contiguous(), matrix.scaling, matrix.begin))
    except (UnsupportedModel, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise DataCorrupted(f"the adapter's files cannot be used: {error}") from error
    return Adapter(adapter_id, tuple(layers), sum(_num_elements(each) for each in matrices) * dtype.itemsize)


def _tensor(entry: Mapping[str, Any], shape: tuple[int, int], body: Tensor) -> Tensor:
    """A copy of a tensor of a safetensors file: its bytes there may not be aligned."""
    begin, end = entry["data_offsets"]
    return body[begin:end].clone().view(TORCH_DTYPES[entry["dtype"]]).view(shape)


def _num_elements(matrix: AdaptedMatrix) -> int:
    return matrix.rank * (matrix.num_in + matrix.num_out)
