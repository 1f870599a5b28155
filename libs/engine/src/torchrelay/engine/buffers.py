"""Tensors over plain buffers, and back, without a copy where possible."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def as_tensor(data: memoryview) -> Tensor:
    """The buffer as uint8, not copied. Do not write to the tensor: torch has no read-only tensors, and warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        # Torch does not prevent the release of the caller's view, so it gets its own.
        return torch.frombuffer(data[:], dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes on the host; no copy if it is contiguous and on the CPU."""
    data: memoryview = tensor.contiguous().view(torch.uint8).cpu().numpy().reshape(-1).data
    return data
