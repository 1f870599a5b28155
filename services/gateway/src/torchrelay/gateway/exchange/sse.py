"""JSON within server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

# Characters at which clients split lines that take more than line feeds for their ends.
_LINE_ENDS = {"\u0085".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


def comment(text: str) -> bytes:
    """A comment, which clients ignore. ``text``: one line."""
    return f": {text}\n\n".encode()


def encode_json(value: Any) -> bytes:
    """JSON without characters that any client takes for the end of a line."""
    encoded = msgspec.json.encode(value)
    if b"\xe2\x80" in encoded or b"\xc2\x85" in encoded:
        for character, escaped in _LINE_ENDS.items():
            encoded = encoded.replace(character, escaped)
    return encoded


def data_event(body: Any) -> bytes:
    """An event without a type."""
    return b"data: " + encode_json(body) + b"\n\n"
