"""Identifiers: a prefix that names the kind, then 100 random bits."""

from __future__ import annotations

import secrets

_ALPHABET = b"0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no letters that are easily confused
_LETTERS = _ALPHABET * 8  # a letter per byte value, all equally likely


def new_id(prefix: str) -> str:
    """A new identifier such as ``req-8x2kq...``: the prefix and 20 characters of 5 bits."""
    return f"{prefix}-{secrets.token_bytes(20).translate(_LETTERS).decode()}"
