"""Keys of the remote store are made of digests, and a pack's keys give its id back."""

from __future__ import annotations

import pytest

from torchrelay.common.errors import InvalidRequest
from torchrelay.param_store.remote.keys import file_key, manifest_key, pack_key, parse_pack_key, version_key

DIGEST = "0a" * 32


def test_pack_id_parsed_only_from_pack_keys() -> None:
    assert parse_pack_key(pack_key(DIGEST)) == (DIGEST, False)
    assert parse_pack_key(manifest_key(DIGEST)) == (DIGEST, True)
    for key in (file_key(DIGEST), version_key(DIGEST), DIGEST, f"packs/{DIGEST}x", "packs/", f"{DIGEST}.manifest"):
        assert parse_pack_key(key) == ("", False)


@pytest.mark.parametrize("digest", ["", "0A" * 32, "0a" * 31, "../" + "0a" * 31, "0a" * 32 + "\n"])
def test_key_requires_digest(digest: str) -> None:
    with pytest.raises(InvalidRequest, match="pack_id must be 64 lower-case hex digits"):
        pack_key(digest)
