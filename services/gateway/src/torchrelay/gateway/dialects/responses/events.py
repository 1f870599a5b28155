"""The events of a streamed response."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchrelay.common.ids import new_id
from torchrelay.gateway.exchange.sse import encode_json


class Event(NamedTuple):
    """An event: its type, and the fields of that type as JSON without braces."""

    type: bytes
    fields: bytes


def event_of(event_type: str, **fields: Any) -> Event:
    return Event(event_type.encode(), encode_json(fields)[1:-1])


def underscored_id(prefix: str) -> str:
    """A new identifier in OpenAI's style, such as ``msg_8x2kq...``."""
    return new_id(prefix).replace("-", "_")
