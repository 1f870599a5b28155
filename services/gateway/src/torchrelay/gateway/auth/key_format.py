"""The form of an API key: ``tr-<key id>-<secret><checksum>``.

The checksum (CRC-32 of what stands before it) lets a mistyped or cut-off key be refused without a look-up, and lets
secret scanners tell a real key from a look-alike. It protects nothing: the secret's 160 random bits do.
"""

from __future__ import annotations

import hmac
import re
import secrets
import zlib

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_CHARS, _SECRET_CHARS, _CHECKSUM_CHARS = 16, 32, 7
_FORM = re.compile(rf"tr-([{_ALPHABET}]{{{_ID_CHARS}}})-[{_ALPHABET}]{{{_SECRET_CHARS + _CHECKSUM_CHARS}}}")


def new_token() -> tuple[str, str]:
    """A fresh key: its id, which may be shown, and the whole token, which is shown once."""
    key_id = _random(_ID_CHARS)
    body = f"tr-{key_id}-{_random(_SECRET_CHARS)}"
    return key_id, body + _checksum(body)


def key_id_of(token: str) -> str | None:
    """The id inside ``token``, or ``None`` when the form or the checksum is wrong."""
    form = _FORM.fullmatch(token)
    if form is None or _checksum(token[:-_CHECKSUM_CHARS]) != token[-_CHECKSUM_CHARS:]:
        return None
    return form[1]


def mac_of(pepper: bytes, token: str) -> str:
    """What is stored instead of the token: HMAC-SHA256 under the install's pepper, hex."""
    return hmac.digest(pepper, token.encode(), "sha256").hex()


def _random(num_chars: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(num_chars))


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(5 * (_CHECKSUM_CHARS - 1), -1, -5))
