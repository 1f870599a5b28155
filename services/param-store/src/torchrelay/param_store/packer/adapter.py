"""PEFT's LoRA adapters, checked against their base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torchrelay.modelspec.adapter import UnsupportedTensor, adapted_matrices, opaque_matrices
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.tensor_order import DTYPE_BYTES
from torchrelay.param_store.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from torchrelay.param_store.packer.core import PackRefused, StoredTensor, quoted
from torchrelay.param_store.packer.documents import read_document
from torchrelay.param_store.packer.dtype_conversion import convert
from torchrelay.param_store.packer.finite_values import first_not_finite
from torchrelay.param_store.packer.safetensors_header import read_tensors

_BLOCK_BYTES: Final = 8 << 20


def check_adapter(folder: Path, base: dict[str, Any], base_dtype: str, *, is_opaque: bool = False) -> int:
    """Checks an uploaded adapter of the base model whose config.json is ``base``, and to whose dtype its weights are
    converted; returns the number of projections that it changes. ``is_opaque``: the base model's pack is.

    Raises ``PackRefused`` with the file, and the field or tensor.
    """
    tensors = {tensor.name: tensor for tensor in read_tensors(folder, ADAPTER_WEIGHTS)}
    try:
        document = read_document(folder, ADAPTER_CONFIG)
        if is_opaque:
            matrices = list(opaque_matrices(document, {name: tensor.shape for name, tensor in tensors.items()}))
        else:
            adapted = adapted_matrices(read_config(base), document, set(tensors))
            matrices = [(matrix.rank, matrix.tensors) for matrix in adapted]
    except UnsupportedTensor as error:
        raise PackRefused(ADAPTER_WEIGHTS, f"tensor {quoted(error.field)}: {error}") from None
    except UnsupportedModel as error:
        raise PackRefused(ADAPTER_CONFIG, f"{error.field}: {error}") from None
    for rank, shapes in matrices:
        for name, shape in shapes.items():
            _check_tensor(folder, tensors[name], shape, rank, base_dtype)
    return len(matrices)


def _check_tensor(folder: Path, tensor: StoredTensor, shape: tuple[int, int], rank: int, base_dtype: str) -> None:
    if tensor.shape != shape:
        detail = f"its shape is {tensor.shape}; rank {rank} and the base model require {shape}"
    elif tensor.dtype not in DTYPE_BYTES:
        detail = f"its dtype is {tensor.dtype}; adapters have one of {', '.join(DTYPE_BYTES)}"
    elif fault := _not_finite(folder, tensor, base_dtype):
        detail = fault
    else:
        return
    raise PackRefused(ADAPTER_WEIGHTS, f"tensor {quoted(tensor.name)}: {detail}")


def _not_finite(folder: Path, tensor: StoredTensor, base_dtype: str) -> str:
    """The first element that is NaN or infinite, or becomes infinite in the base's dtype, in words; empty if there is
    none.
    """
    with (folder / tensor.file).open("rb") as file:
        file.seek(tensor.offset)
        for begin in range(0, tensor.num_bytes, _BLOCK_BYTES):
            block = memoryview(file.read(min(_BLOCK_BYTES, tensor.num_bytes - begin)))
            first = begin // DTYPE_BYTES[tensor.dtype]
            if fault := first_not_finite(block, tensor.dtype):
                return f"element {first + fault[0]:,} is {fault[1]}; all weights must be finite numbers"
            converted = memoryview(bytearray(len(block) // DTYPE_BYTES[tensor.dtype] * DTYPE_BYTES[base_dtype]))
            convert(block, tensor.dtype, converted, base_dtype)
            if fault := first_not_finite(converted, base_dtype):
                return f"element {first + fault[0]:,} is beyond the range of {base_dtype}, the dtype of the base model"
    return ""
