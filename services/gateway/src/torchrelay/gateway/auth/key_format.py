"""The format of API keys: ``tr-<key id>-<secret><checksum>``, of operators ``tro-...``.

The checksum (CRC-32 of the preceding characters) rejects mistyped or truncated keys without a lookup and lets secret
scanners recognize real keys. Security rests on the secret's 160 random bits alone.
"""

from __future__ import annotations

import hmac
import re
import secrets
import zlib
from typing import Final

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_CHARS, _SECRET_CHARS, _CHECKSUM_CHARS = 16, 32, 7
OPERATOR: Final = "tro"
_TOKEN = re.compile(rf"(tro?)-([{_ALPHABET}]{{{_ID_CHARS}}})-[{_ALPHABET}]{{{_SECRET_CHARS + _CHECKSUM_CHARS}}}")


def new_token(key_id: str = "", prefix: str = "tr") -> tuple[str, str]:
    """A new key, or a new secret of the key with this id: the public id, and the whole token."""
    key_id = key_id or _random(_ID_CHARS)
    body = f"{prefix}-{key_id}-{_random(_SECRET_CHARS)}"
    return key_id, body + _checksum(body)


def key_id_of(token: str, prefix: str = "tr") -> str | None:
    """The id inside ``token``, or ``None`` if its prefix, format or checksum is wrong."""
    match = _TOKEN.fullmatch(token)
    if match is None or match[1] != prefix or _checksum(token[:-_CHECKSUM_CHARS]) != token[-_CHECKSUM_CHARS:]:
        return None
    return match[2]


def mac_of(pepper: bytes, token: str) -> str:
    """The stored hash of a token: HMAC-SHA256 under the installation's pepper, hex."""
    return hmac.digest(pepper, token.encode(), "sha256").hex()


def _random(num_chars: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(num_chars))


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(5 * (_CHECKSUM_CHARS - 1), -1, -5))
