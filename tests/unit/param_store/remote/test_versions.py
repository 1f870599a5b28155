"""Publishing and deleting versions at the same time, what processes that died left behind, and the keys of objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.wait import HANG_S
from tests.unit.param_store.model_folders import write_folder
from torchrelay.common.errors import Conflict, InvalidRequest, NotFound
from torchrelay.param_store.packer.__main__ import pack
from torchrelay.param_store.remote.folder_store import FolderStore
from torchrelay.param_store.remote.keys import file_key, manifest_key, pack_key, parse_pack_key, version_key
from torchrelay.param_store.remote.versions import Version, Versions


class WatchedStore(FolderStore):
    """Counts the documents read, and holds back the put of a key until it is told to go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.documents_read: list[str] = []
        self.held_prefix = "none"
        self.reached, self.going_on = threading.Event(), threading.Event()

    def get_bytes(self, key: str) -> bytes:
        if key.startswith("versions/"):
            self.documents_read.append(key)
        return super().get_bytes(key)

    def put_bytes(self, key: str, data: bytes) -> None:
        if key.startswith(self.held_prefix) and not self.reached.is_set():
            self.reached.set()
            assert self.going_on.wait(HANG_S)
        super().put_bytes(key, data)


@pytest.fixture
def remote(tmp_path: Path) -> WatchedStore:
    return WatchedStore(tmp_path / "remote")


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


class Model:
    """A packed model; published with different templates it is versions that share a pack."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.pack_path, self.template = folder / "draft.pack", folder / "template"
        model = write_folder(folder / "model", seed=seed)
        pack(model, self.pack_path, 0)
        self.files = {"tokenizer.json": model / "tokenizer.json", "config.json": model / "config.json"}

    def publish(self, versions: Versions, template: str) -> Version:
        self.template.write_text(template)
        return versions.publish(self.pack_path, {**self.files, "chat_template.jinja": self.template})


def keys_in(remote: FolderStore) -> set[str]:
    return {stored.key for prefix in ("packs/", "files/", "versions/") for stored in remote.objects(prefix)}


def test_deletion_reads_each_document_once(tmp_path: Path, remote: WatchedStore) -> None:
    model, versions = Model(tmp_path), Versions(remote)
    published = [model.publish(versions, str(number)) for number in range(6)]
    versions.delete(published[0].version_id)
    remote.documents_read.clear()
    for version in published[1:4]:
        assert versions.delete(version.version_id) == 1  # its template
    assert remote.documents_read == []
    restarted = Versions(remote)
    assert restarted.delete(published[4].version_id) == 1
    assert restarted.delete(published[5].version_id) == published[5].stored_bytes
    assert sorted(remote.documents_read) == sorted(f"versions/{v.version_id}.json" for v in published[4:])
    assert keys_in(remote) == set()


def test_deletion_spares_pack_being_published(tmp_path: Path, remote: WatchedStore, thread: ThreadPoolExecutor) -> None:
    model, versions = Model(tmp_path), Versions(remote)
    old = model.publish(versions, "old")
    remote.held_prefix = "packs/"  # its manifest: the pack is there
    publishing = thread.submit(model.publish, versions, "new")
    assert remote.reached.wait(HANG_S)
    assert versions.delete(old.version_id) == len("old")
    assert versions.delete_unnamed(older_than_s=0) == 0
    remote.going_on.set()
    assert versions.describe(publishing.result(HANG_S).version_id).pack_id == old.pack_id
    assert f"packs/{old.pack_id}" in keys_in(remote)


def test_large_publication_does_not_block_others(
    tmp_path: Path, remote: WatchedStore, thread: ThreadPoolExecutor
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "small").mkdir()
    large, small, versions = Model(tmp_path / "large"), Model(tmp_path / "small", seed=1), Versions(remote)
    remote.held_prefix = "packs/"
    publishing = thread.submit(large.publish, versions, "large")
    assert remote.reached.wait(HANG_S)
    version = small.publish(versions, "small")
    assert versions.delete(version.version_id) > 0
    remote.going_on.set()
    published = publishing.result(HANG_S)
    assert [stored.version_id for stored in versions.all()] == [published.version_id]


def test_republished_version_not_deleted(tmp_path: Path, remote: WatchedStore) -> None:
    model, versions = Model(tmp_path), Versions(remote)
    version_id = model.publish(versions, "one").version_id
    (listed,) = versions.all()
    model.publish(versions, "one")
    with pytest.raises(Conflict, match="published again"):
        versions.delete(version_id, listed.published_unix_us)
    (listed,) = versions.all()
    versions.delete(version_id, listed.published_unix_us)
    with pytest.raises(NotFound):
        versions.delete(version_id, listed.published_unix_us)


def test_version_of_unconfirmed_upload_not_deleted(tmp_path: Path, remote: WatchedStore) -> None:
    kept: set[str] = set()
    model, versions = Model(tmp_path), Versions(remote, lambda: kept)
    version_id = model.publish(versions, "one").version_id
    kept.add(version_id)
    with pytest.raises(Conflict):
        versions.delete(version_id)
    kept.clear()
    versions.delete(version_id)


def test_old_unnamed_objects_deleted(tmp_path: Path, remote: WatchedStore) -> None:
    """A store was killed before a version's document was put, or after it was deleted."""
    model, versions = Model(tmp_path), Versions(remote)
    version = model.publish(versions, "named")
    before = keys_in(remote)
    unnamed = [f"packs/{'0' * 64}", f"packs/{'0' * 64}.manifest", f"files/{'1' * 64}"]
    for key in unnamed:
        remote.put_bytes(key, b"left behind")
    assert versions.delete_unnamed(older_than_s=3600) == 0
    assert keys_in(remote) == before | set(unnamed)
    assert versions.delete_unnamed(older_than_s=0) == 33
    assert keys_in(remote) == before
    remote.delete(f"versions/{version.version_id}.json")
    assert Versions(remote).delete_unnamed(older_than_s=0) == version.stored_bytes
    assert keys_in(remote) == set()


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
