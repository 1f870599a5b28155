"""Tensors over plain buffers, and back, without a copy where possible."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def as_tensor(data: memoryview) -> Tensor:
    """The buffer as uint8, not copied. It must not be written to: torch has no read-only tensors, and warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        # A view of its own: torch does not keep the caller's from being released.
        return torch.frombuffer(data[:], dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes on the host; no copy if it is contiguous and on the CPU."""
    data: memoryview = tensor.contiguous().view(torch.uint8).cpu().numpy().reshape(-1).data
    return data
