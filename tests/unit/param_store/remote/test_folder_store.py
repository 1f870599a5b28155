"""A folder as remote store: whole objects or none, ranges past the page cache and through it."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest

from torchrelay.common.errors import DataCorrupted, InvalidRequest, NotFound
from torchrelay.common.ids import new_id
from torchrelay.param_store.remote.folder_store import FolderStore
from torchrelay.param_store.remote.remote_store import open_remote


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "remote")


def test_objects_are_put_read_listed_and_deleted(tmp_path: Path, store: FolderStore) -> None:
    (tmp_path / "a").write_bytes(b"from a file")
    store.put_file("packs/a", tmp_path / "a")
    store.put_file("packs/a", tmp_path / "a")
    store.put_bytes("packs/b", b"from memory")
    assert store.get_bytes("packs/a") == b"from a file"
    assert store.size("packs/b") == 11
    assert [stored.key for stored in store.objects("packs/")] == ["packs/a", "packs/b"]
    assert [stored.key for stored in store.objects("files/")] == []
    store.delete("packs/a")
    store.delete("packs/a")
    assert [stored.key for stored in store.objects("packs/")] == ["packs/b"]
    assert list((tmp_path / "remote/drafts").iterdir()) == []
    for absent in (store.get_bytes, store.size, store.open_range):
        with pytest.raises(NotFound, match="the remote store has no packs/a"):
            absent("packs/a")


def test_file_of_other_file_system_copied(store: FolderStore) -> None:
    source = Path("/dev/shm") / new_id("torchrelay-test")
    try:
        source.write_bytes(b"elsewhere")
        store.put_file("files/x", source)
    finally:
        source.unlink()
    assert store.get_bytes("files/x") == b"elsewhere"


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a//b", "", "a\0b"])
def test_key_outside_folder_refused(store: FolderStore, key: str) -> None:
    with pytest.raises(InvalidRequest):
        store.get_bytes(key)


def test_ranges_read_at_any_alignment(store: FolderStore) -> None:
    data = os.urandom(3 * 4096 + 100)
    store.put_bytes("packs/a", data)
    reader = store.open_range("packs/a")
    memory = memoryview(mmap.mmap(-1, 4 * 4096))
    for offset, begin, size in ((0, 0, 8192), (4096, 4096, 4096), (8192, 0, 4196), (100, 7, 5000), (0, 1, 4096)):
        reader.read_into(offset, memory[begin : begin + size], threading.Event())
        assert bytes(memory[begin : begin + size]) == data[offset : offset + size]
    with pytest.raises(DataCorrupted, match="packs/a of the remote store ends at byte 12388"):
        reader.read_into(4096, memory, threading.Event())
    reader.close()


def test_only_abandoned_drafts_removed(tmp_path: Path, store: FolderStore) -> None:
    old, new = tmp_path / "remote/drafts/old", tmp_path / "remote/drafts/new"
    for draft in (old, new):
        draft.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    FolderStore(tmp_path / "remote")
    assert (old.exists(), new.exists()) == (False, True)


def test_urls_name_folders(tmp_path: Path) -> None:
    open_remote(f"file://{tmp_path}/with%20space").put_bytes("files/a", b"1")
    assert (tmp_path / "with space/files/a").read_bytes() == b"1"
    for url in ("ftp://host/x", "file://host/x", "folder"):
        with pytest.raises(InvalidRequest) as refused:
            open_remote(url)
        assert refused.value.field == "remote_url"
