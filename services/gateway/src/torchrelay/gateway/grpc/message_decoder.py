"""Decodes messages of callers, with errors that name the faulty field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from torchrelay.common.errors import InvalidRequest

M = TypeVar("M", bound=Message)
_LENGTH_DELIMITED: Final = 2  # the wire type of strings and messages
_MAX_INSPECTED_BYTES: Final = 1 << 16  # parsing megabytes again to find a faulty field would take seconds


def decode(kind: type[M], encoded: bytes) -> M:
    """Raises ``InvalidRequest``."""
    try:
        return kind.FromString(encoded)
    except DecodeError as error:
        if len(encoded) <= _MAX_INSPECTED_BYTES and (field := _faulty_string(kind.DESCRIPTOR, encoded)):
            message = f"{field} is not valid UTF-8, which has no lone surrogates for example"
            raise InvalidRequest(message, field=field) from error
        raise InvalidRequest(f"the call's message is not valid: {error}") from error


def _faulty_string(kind: Any, encoded: bytes) -> str | None:
    """The path of the first string that is not UTF-8; None if the message is malformed in another way."""
    try:
        for path, text in _strings(kind, encoded, ""):
            try:
                text.decode()
            except UnicodeDecodeError:
                return path
    except DecodeError:
        pass
    return None


def _strings(kind: Any, encoded: bytes, prefix: str) -> Iterator[tuple[str, bytes]]:
    """All strings within a message, each with the path of its field. Raises ``DecodeError``."""
    counts: Counter[int] = Counter()
    parts: Any = UnknownFieldSet(Empty.FromString(encoded))  # of an empty message every field is unknown
    for part in parts:
        field: Any = kind.fields_by_number.get(part.field_number)
        if field is None or part.wire_type != _LENGTH_DELIMITED:
            continue
        path = f"{prefix}{field.name}"
        if field.is_repeated:
            path = f"{path}.{counts[part.field_number]}"
            counts[part.field_number] += 1
        if field.type == FieldDescriptor.TYPE_STRING:
            yield path, part.data
        elif field.message_type is not None:
            yield from _strings(field.message_type, part.data, f"{path}.")
