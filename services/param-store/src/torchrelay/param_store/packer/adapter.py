"""PEFT's LoRA adapters, checked against their base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torchrelay.modelspec.adapter import UnsupportedTensor, adapted_matrices
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.tensor_order import DTYPE_BYTES
from torchrelay.param_store.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from torchrelay.param_store.packer.core import PackRefused, StoredTensor, quoted
from torchrelay.param_store.packer.documents import read_document
from torchrelay.param_store.packer.finite_values import first_not_finite
from torchrelay.param_store.packer.safetensors_header import read_tensors

_BLOCK_BYTES: Final = 8 << 20


def check_adapter(folder: Path, base: dict[str, Any]) -> int:
    """Checks an uploaded adapter of the base model whose config.json is ``base``; returns the number of projections
    that it changes.

    Raises ``PackRefused`` with the file, and the field or tensor.
    """
    tensors = {tensor.name: tensor for tensor in read_tensors(folder, ADAPTER_WEIGHTS)}
    try:
        matrices = adapted_matrices(read_config(base), read_document(folder, ADAPTER_CONFIG), set(tensors))
    except UnsupportedTensor as error:
        raise PackRefused(ADAPTER_WEIGHTS, f"tensor {quoted(error.field)}: {error}") from None
    except UnsupportedModel as error:
        raise PackRefused(ADAPTER_CONFIG, f"{error.field}: {error}") from None
    for matrix in matrices:
        for name, shape in matrix.tensors.items():
            _check_tensor(folder, tensors[name], shape, matrix.rank)
    return len(matrices)


def _check_tensor(folder: Path, tensor: StoredTensor, shape: tuple[int, int], rank: int) -> None:
    if tensor.shape != shape:
        detail = f"its shape is {tensor.shape}; rank {rank} and the base model require {shape}"
    elif tensor.dtype not in DTYPE_BYTES:
        detail = f"its dtype is {tensor.dtype}; adapters have one of {', '.join(DTYPE_BYTES)}"
    elif fault := _not_finite(folder, tensor):
        detail = fault
    else:
        return
    raise PackRefused(ADAPTER_WEIGHTS, f"tensor {quoted(tensor.name)}: {detail}")


def _not_finite(folder: Path, tensor: StoredTensor) -> str:
    """The first element that is NaN or infinite, in words; empty if there is none."""
    with (folder / tensor.file).open("rb") as file:
        file.seek(tensor.offset)
        for begin in range(0, tensor.num_bytes, _BLOCK_BYTES):
            block = file.read(min(_BLOCK_BYTES, tensor.num_bytes - begin))
            if fault := first_not_finite(memoryview(block), tensor.dtype):
                index = begin // DTYPE_BYTES[tensor.dtype] + fault[0]
                return f"element {index:,} is {fault[1]}; all weights must be finite numbers"
    return ""
