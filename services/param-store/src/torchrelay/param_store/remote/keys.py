"""Keys of the remote store, each of which contains a digest, but for those of tenants' files."""

from __future__ import annotations

import re

from torchrelay.common.errors import InvalidRequest

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")


def is_digest(text: str) -> bool:
    """Whether ``text`` is a 256-bit digest as in keys: 64 lower-case hex digits."""
    return _DIGEST.fullmatch(text) is not None


def checked_digest(digest: str, field: str) -> str:
    """Returns ``digest``. Raises ``InvalidRequest`` with ``field`` if it is not a digest."""
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


def compiled_key(pack_id: str, digest: str) -> str:
    return f"compiled/{checked_digest(pack_id, 'pack_id')}.{checked_digest(digest, 'digest')}"


def object_key(tenant_id: str, name: str) -> str:
    """The key of a tenant's file. Raises ``InvalidRequest`` for a name that could leave the tenant's folder."""
    for field, value in (("tenant_id", tenant_id), ("name", name)):
        if _NAME.fullmatch(value) is None:
            raise InvalidRequest(f"{field} must be lower-case letters, digits and hyphens", field=field)
    return f"objects/{tenant_id}/{name}"


def owner_key(key: str) -> str:
    """The key that versions name for an object: that of the pack which code was compiled for, or the object's own."""
    name = key.removeprefix("compiled/")
    return key if name == key else f"packs/{name.partition('.')[0]}"


def parse_pack_key(key: str) -> tuple[str, bool]:
    """The pack id in the key of a pack or manifest, and whether it is a manifest's key; ("", False) for other keys."""
    name = key.removeprefix("packs/")
    pack_id = name.removesuffix(".manifest")
    return (pack_id, name != pack_id) if name != key and is_digest(pack_id) else ("", False)
