"""Identifiers: a short prefix that says what it names, then 100 random bits."""

from __future__ import annotations

import secrets

_ALPHABET = b"0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: nothing that is misread aloud
_LETTERS = _ALPHABET * 8  # a letter for each byte, all equally likely


def new_id(prefix: str) -> str:
    """A fresh identifier such as ``req-8x2kq...``; 20 characters of 5 bits after the prefix."""
    return f"{prefix}-{secrets.token_bytes(20).translate(_LETTERS).decode()}"
