"""The vectors of a reply: shortened, normalized and encoded. Pure."""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Iterable, Iterator

import msgspec

FLOAT_BYTES = 4
_PART_BYTES = 16 << 10


def encoded(values: bytes, is_normalized: bool, as_base64: bool) -> bytes:
    """The JSON of a vector, whose first dimensions in fp32, little-endian, are ``values``.

    It is scaled to length 1 if the model's vectors are. Its numbers are rounded to fp32; or it is the base64 of their
    bytes.
    """
    form = f"<{len(values) // FLOAT_BYTES}f"
    vector = struct.unpack(form, values)
    length = math.hypot(*vector) if is_normalized else 1.0
    if length not in (0.0, 1.0):
        values = struct.pack(form, *(value / length for value in vector))
    return b'"%s"' % b64encode(values) if as_base64 else msgspec.json.encode(struct.unpack(form, values))


def reply_parts(model: str, vectors: Iterable[bytes], num_tokens: int) -> Iterator[bytes]:
    """The JSON of a reply, in parts of a vector or a few short ones."""
    part = b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        part += b'%s{"object":"embedding","index":%d,"embedding":%s}' % (b"," if index else b"", index, vector)
        if len(part) >= _PART_BYTES:
            yield part
            part = b""
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    yield part + b'],"model":%s,"usage":%s}' % (msgspec.json.encode(model), msgspec.json.encode(usage))
