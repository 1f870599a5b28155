"""The vectors of a reply: shortened, normalized and encoded. Pure."""

from __future__ import annotations

import math
import struct
from base64 import b64encode

import msgspec

FLOAT_BYTES = 4


def shortened(values: bytes, num_dimensions: int, is_normalized: bool) -> tuple[float, ...]:
    """The first dimensions of a vector in fp32, little-endian; scaled to length 1 if the model's vectors are."""
    vector = struct.unpack_from(f"<{num_dimensions}f", values)
    length = math.hypot(*vector) if is_normalized else 1.0
    return vector if length in (0.0, 1.0) else tuple(value / length for value in vector)


def encoded(vector: tuple[float, ...], as_base64: bool) -> msgspec.Raw:
    """The vector as JSON: its numbers rounded to fp32, or the base64 of their bytes in fp32, little-endian."""
    packed = struct.pack(f"<{len(vector)}f", *vector)
    if as_base64:
        return msgspec.Raw(b'"%s"' % b64encode(packed))
    return msgspec.Raw(msgspec.json.encode(struct.unpack(f"<{len(vector)}f", packed)))
