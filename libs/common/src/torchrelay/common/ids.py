"""Identifiers: a short prefix that says what it names, then 100 random bits."""

from __future__ import annotations

import secrets

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: nothing that is misread aloud


def new_id(prefix: str) -> str:
    """A fresh identifier such as ``req-8x2kq...``; 20 characters of 5 bits after the prefix."""
    return f"{prefix}-{''.join(secrets.choice(_ALPHABET) for _ in range(20))}"
