"""Keys of the remote store: every one is made of a digest."""

from __future__ import annotations

import re

from torchrelay.common.errors import InvalidRequest

_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether ``text`` is a digest of 256 bits as keys spell it: 64 lower-case hex digits."""
    return _DIGEST.fullmatch(text) is not None


def checked_digest(digest: str, field: str) -> str:
    """``digest`` itself. Raises ``InvalidRequest`` naming ``field`` if it is not one."""
    if not is_digest(digest):
        raise InvalidRequest(f"{field} must be 64 lower-case hex digits", field=field)
    return digest


def pack_key(pack_id: str) -> str:
    return f"packs/{checked_digest(pack_id, 'pack_id')}"


def manifest_key(pack_id: str) -> str:
    return f"{pack_key(pack_id)}.manifest"


def file_key(digest: str) -> str:
    return f"files/{checked_digest(digest, 'digest')}"


def version_key(version_id: str) -> str:
    return f"versions/{checked_digest(version_id, 'version_id')}.json"


def parse_pack_key(key: str) -> tuple[str, bool]:
    """The pack id in a pack's key or its manifest's, and whether it is the manifest's; ("", False) for other keys."""
    name = key.removeprefix("packs/")
    pack_id = name.removesuffix(".manifest")
    return (pack_id, name != pack_id) if name != key and is_digest(pack_id) else ("", False)
