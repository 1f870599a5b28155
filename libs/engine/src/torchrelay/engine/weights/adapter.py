"""The weights of a LoRA adapter, beside those of its base model."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

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
_TURN_BYTES: Final = 8 << 20  # converted at a time: a few milliseconds


class AdapterReader:
    """Reads an adapter of the model ``config`` from PEFT's two files into the dtype of the model, on its device.

    It reads a part at a time, so that an engine can step between the parts. The files were checked at upload.
    """

    def __init__(
        self,
        adapter_id: str,
        document: bytes,
        weights: bytes,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        turn_bytes: int = _TURN_BYTES,
    ) -> None:
        """(any thread) Reads the headers, and computes nothing. Raises ``DataCorrupted`` if they do not fit."""
        self._adapter_id, self._dtype, self._device, self._turn_bytes = adapter_id, dtype, device, turn_bytes
        with _refusals():
            num_header_bytes = 8 + int.from_bytes(weights[:8], "little")
            self._header: dict[str, Any] = json.loads(weights[8:num_header_bytes])
            self._header.pop(_METADATA, None)
            matrices = adapted_matrices(config, json.loads(document), set(self._header))
            self._body = as_tensor(memoryview(weights)[num_header_bytes:])
        self.num_bytes = sum(map(_num_elements, matrices)) * dtype.itemsize  # of the adapter
        self._left = deque(matrices)
        self._layers: list[dict[str, tuple[LowRank, ...]]] = [{} for _ in range(config.num_layers)]

    def read_part(self) -> bool:
        """Converts the next matrices; returns whether there are more. Raises ``DataCorrupted``."""
        num_bytes = 0
        with _refusals():
            while self._left and num_bytes < self._turn_bytes:
                matrix = self._left.popleft()
                a, b = (self._tensor(name, shape) for name, shape in matrix.tensors.items())
                of_layer = self._layers[matrix.layer]
                change = LowRank(a, b.t().contiguous(), matrix.scaling, matrix.begin)
                of_layer[matrix.group] = (*of_layer.get(matrix.group, ()), change)
                num_bytes += _num_elements(matrix) * self._dtype.itemsize
        return bool(self._left)

    def read(self) -> Adapter:
        """The adapter, after the parts that are left. Raises ``DataCorrupted``."""
        while self.read_part():
            pass
        return Adapter(self._adapter_id, tuple(self._layers), self.num_bytes)

    def _tensor(self, name: str, shape: tuple[int, int]) -> Tensor:
        entry: Mapping[str, Any] = self._header[name]
        begin, end = entry["data_offsets"]
        # A copy, because the bytes in the file may not be aligned.
        stored = self._body[begin:end].clone().view(TORCH_DTYPES[entry["dtype"]]).view(shape)
        tensor = stored.to(self._device, self._dtype)
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has a number beyond the range of {self._dtype}, the dtype of the base model")
        return tensor


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (UnsupportedModel, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise DataCorrupted(f"the adapter's files cannot be used: {error}") from error


def _num_elements(matrix: AdaptedMatrix) -> int:
    return matrix.rank * (matrix.num_in + matrix.num_out)
