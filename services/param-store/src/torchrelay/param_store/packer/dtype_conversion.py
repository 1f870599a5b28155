"""Weights in another dtype: rounded to the nearest value, to the even of two, as torch rounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def convert(data: memoryview, dtype: str, into: memoryview, into_dtype: str) -> None:
    """Writes the finite values of ``data`` to ``into``; a value beyond the range of ``into_dtype`` becomes infinite."""
    wide = widened(data, dtype)
    if into_dtype == "F32":
        np.frombuffer(into, np.float32)[:] = wide
    elif into_dtype == "F16":
        with np.errstate(over="ignore"):
            np.frombuffer(into, np.float16)[:] = wide
    else:
        bits = wide.view(np.uint32)
        np.frombuffer(into, np.uint16)[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def widened(data: memoryview, dtype: str) -> npt.NDArray[np.float32]:
    """The values in fp32."""
    if dtype == "F32":
        return np.frombuffer(data, np.float32)
    if dtype == "F16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
