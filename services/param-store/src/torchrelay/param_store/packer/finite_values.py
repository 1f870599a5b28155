"""Checks of weights for NaN, infinity and bad scales: a single such value turns every answer into noise."""

from __future__ import annotations

from typing import Final

import numpy as np

_BLOCK: Final = 1 << 16  # elements per step; with their copy they fit a core's cache
# A value is NaN or infinite when all bits of its exponent are set.
_EXPONENT: Final = {"F32": 0x7F80_0000, "BF16": 0x7F80, "F16": 0x7C00, "F8_E4M3": 0x7F}
_MAGNITUDE: Final = {"F32": 0x7FFF_FFFF, "BF16": 0x7FFF, "F16": 0x7FFF, "F8_E4M3": 0x7F}
_BITS: Final = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16, "F8_E4M3": np.uint8}
FLOATS: Final = frozenset(_BITS)


def first_not_finite(data: memoryview, dtype: str) -> tuple[int, str] | None:
    """The index of the first value that is not finite, and "NaN" or "infinite". None: all values are finite."""
    exponent, magnitude = _EXPONENT[dtype], _MAGNITUDE[dtype]
    values = np.frombuffer(data, _BITS[dtype])
    scratch = np.empty(min(_BLOCK, len(values)), values.dtype)
    for begin in range(0, len(values), _BLOCK):
        part = values[begin : begin + _BLOCK]
        magnitudes = np.bitwise_and(part, magnitude, out=scratch[: len(part)])
        if int(magnitudes.max()) >= exponent:
            index = int(np.argmax(magnitudes >= exponent))
            is_infinite = int(magnitudes[index]) == exponent and dtype != "F8_E4M3"  # which has no infinity
            return begin + index, "infinite" if is_infinite else "NaN"
    return None


def first_not_positive(data: memoryview, dtype: str) -> tuple[int, str] | None:
    """The index of the first finite value that is not above zero, and "negative" or "zero". None: all values are."""
    values = np.frombuffer(data, _BITS[dtype])
    wrong = np.logical_or(np.equal(values, 0), np.greater(values, _MAGNITUDE[dtype]))  # or with a sign
    if not wrong.any():
        return None
    index = int(np.argmax(wrong))
    return index, "negative" if int(values[index]) & _MAGNITUDE[dtype] else "zero"


def first_not_zero(data: memoryview, dtype: str) -> int | None:
    """The index of the first value that is not zero, with either sign. None: all values are."""
    wrong = np.bitwise_and(np.frombuffer(data, _BITS[dtype]), _MAGNITUDE[dtype])
    return int(np.argmax(wrong != 0)) if wrong.any() else None
