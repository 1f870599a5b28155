"""The remote stores: a folder, and a real S3 protocol server. Whole objects or none, and ranges at any alignment."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.guard import shared_memory_path
from tests.support.s3_server import Fault, FaultyProxy
from torchrelay.common.errors import DataCorrupted, InvalidRequest, NotFound, Unavailable
from torchrelay.common.ids import new_id
from torchrelay.param_store.remote.file_reader import FileReader, ReadBuffers
from torchrelay.param_store.remote.folder_store import FolderStore
from torchrelay.param_store.remote.object_store import part_bytes
from torchrelay.param_store.remote.remote_store import RangeReader, RemoteOptions, RemoteStore, open_remote
from torchrelay.transfer.manifest import PAGE_BYTES

MIB = 1 << 20


def test_parts_of_large_packs_are_fewer_than_stores_take() -> None:
    """A pack of 70 billion parameters in bf16 has 141 GB, and S3 takes 10,000 parts."""
    for num_bytes in (0, 1, 83_886_080_000, 141_000_000_000, 5 << 40):
        size = part_bytes(num_bytes)
        assert size >= 8 * MIB and size % MIB == 0 and num_bytes / size <= 9000
    assert part_bytes(60 << 30) == 8 * MIB


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "remote")


@pytest.fixture
def object_store(bucket_url: str, proxy: FaultyProxy) -> RemoteStore:
    return open_remote(bucket_url, RemoteOptions(proxy.endpoint, timeout_s=30.0, give_up_s=0.3))


@pytest.fixture(params=["folder_store", "object_store"])
def store(request: pytest.FixtureRequest) -> RemoteStore:
    chosen: RemoteStore = request.getfixturevalue(request.param)
    return chosen


def read(reader: RangeReader, offset: int, num_bytes: int) -> bytes:
    view = memoryview(bytearray(num_bytes))
    reader.read_into(offset, view, threading.Event())
    return bytes(view)


def keys(store: RemoteStore, prefix: str) -> list[str]:
    return [stored.key for stored in store.objects(prefix)]


def test_objects_are_put_read_listed_and_deleted(tmp_path: Path, store: RemoteStore) -> None:
    (tmp_path / "a").write_bytes(b"from a file")
    store.put_file("packs/a", tmp_path / "a")
    store.put_file("packs/a", tmp_path / "a")
    store.put_bytes("packs/b", b"from memory")
    store.put_bytes("files/c", b"")
    assert store.get_bytes("packs/a") == b"from a file"
    assert store.size("packs/b") == 11
    assert (keys(store, "packs/"), keys(store, "versions/")) == (["packs/a", "packs/b"], [])
    store.delete("packs/a")
    store.delete("packs/a")
    assert keys(store, "packs/") == ["packs/b"]
    for absent in (store.get_bytes, store.size, lambda key: read(store.open_range(key), 0, 1)):
        with pytest.raises(NotFound, match="the remote store has no packs/a"):
            absent("packs/a")
    if isinstance(store, FolderStore):
        assert list((tmp_path / "remote/drafts").iterdir()) == []


def test_ranges_read_at_any_alignment_up_to_end(store: RemoteStore) -> None:
    data = os.urandom(3 * 4096 + 100)
    store.put_bytes("packs/p", data)
    reader, memory = store.open_range("packs/p"), memoryview(mmap.mmap(-1, 4 * 4096))
    for offset, begin, size in ((0, 0, 12388), (4096, 4096, 4096), (8192, 0, 4196), (100, 7, 5000), (12387, 1, 1)):
        reader.read_into(offset, memory[begin : begin + size], threading.Event())
        assert bytes(memory[begin : begin + size]) == data[offset : offset + size]
    with pytest.raises(DataCorrupted, match="packs/p of the remote store ends at byte 12388"):
        read(reader, 4096, 4 * 4096)
    with pytest.raises(DataCorrupted, match=r"packs/p of the remote store (is shorter than its manifest|ends at byte)"):
        read(reader, 20_000, 10)
    reader.close()


def test_file_of_other_file_system_copied(folder_store: FolderStore) -> None:
    source = shared_memory_path(new_id("arena"))
    try:
        source.write_bytes(b"elsewhere")
        folder_store.put_file("files/x", source)
    finally:
        source.unlink()
    assert folder_store.get_bytes("files/x") == b"elsewhere"


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a//b", "", "a\0b"])
def test_key_outside_folder_refused(folder_store: FolderStore, key: str) -> None:
    with pytest.raises(InvalidRequest):
        folder_store.get_bytes(key)


def test_only_abandoned_drafts_removed(tmp_path: Path, folder_store: FolderStore) -> None:
    old, new = tmp_path / "remote/drafts/old", tmp_path / "remote/drafts/new"
    for draft in (old, new):
        draft.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    FolderStore(tmp_path / "remote")
    assert (old.exists(), new.exists()) == (False, True)


def test_urls_name_folders_or_buckets(tmp_path: Path) -> None:
    open_remote(f"file://{tmp_path}/with%20space").put_bytes("files/a", b"1")
    assert (tmp_path / "with space/files/a").read_bytes() == b"1"
    for url in ("ftp://host/x", "file://host/x", "folder", "s3:", "s3:///key", "az://", "gs:bucket"):
        with pytest.raises(InvalidRequest) as refused:
            open_remote(url)
        assert refused.value.field == "remote_url"


class Refusing:
    """``os.preadv`` of a system that refuses direct reads of a descriptor for this reason."""

    def __init__(self, reason: int, direct: int) -> None:
        self.reason, self.direct, self.num_refused = reason, direct, 0
        self._preadv = os.preadv

    def __call__(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        if len(views[0]) % PAGE_BYTES == 0 and file == self.direct:
            self.num_refused += 1
            raise OSError(self.reason, os.strerror(self.reason))
        return self._preadv(file, views, offset)


def test_refused_direct_read_falls_back_to_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, path = os.urandom(3 * PAGE_BYTES + 100), tmp_path / "pack"
    path.write_bytes(data)
    reader = FileReader(path, "packs/a", ReadBuffers())
    if reader.direct < 0:  # this file system refuses the flag already: any descriptor stands for it
        reader.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", Refusing(errno.EIO, reader.direct))
        with pytest.raises(OSError, match="Input/output error"):
            read(reader, 0, PAGE_BYTES)
    refusing = Refusing(errno.EINVAL, reader.direct)
    monkeypatch.setattr(os, "preadv", refusing)
    for offset in (0, PAGE_BYTES, 7):
        assert read(reader, offset, len(data) - offset) == data[offset:]
    assert refusing.num_refused == 1
    with pytest.raises(DataCorrupted, match=f"ends at byte {len(data)}"):
        read(reader, PAGE_BYTES, len(data))
    reader.close()


def test_pack_stored_in_parts_and_read_in_ranges(tmp_path: Path, object_store: RemoteStore, proxy: FaultyProxy) -> None:
    data = os.urandom(18 * MIB + 100)
    (tmp_path / "pack").write_bytes(data)
    faults = [Fault(status=500), Fault(status=503)]
    proxy.decide = lambda asked: faults.pop() if faults else None
    object_store.put_file("packs/p", tmp_path / "pack")
    assert not faults, "the put went on after errors of the server"
    parts = {asked.path for asked in proxy.asked if asked.method == "PUT" and "partNumber" in asked.path}
    assert len(parts) == 3
    reader, memory = object_store.open_range("packs/p"), memoryview(bytearray(len(data)))
    with ThreadPoolExecutor(4) as pool:
        begins = range(0, len(data), MIB)
        list(pool.map(lambda at: reader.read_into(at, memory[at : at + MIB], threading.Event()), begins))
    assert bytes(memory) == data


def test_permanently_broken_server_given_up(object_store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.decide = lambda asked: Fault(status=500)
    calls = (object_store.get_bytes, object_store.size, object_store.delete, lambda key: keys(object_store, f"{key}/"))
    for broken in calls:
        with pytest.raises(Unavailable, match=r"the remote store does not serve packs/p.*500 Internal Server Error$"):
            broken("packs/p")


@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_error_names_settings(object_store: RemoteStore, proxy: FaultyProxy, status: int) -> None:
    proxy.decide = lambda asked: Fault(status=status)
    with pytest.raises(Unavailable, match=r"check remote_url and the credentials .*AWS_ACCESS_KEY_ID") as denied:
        object_store.get_bytes("packs/p")
    assert denied.value.field == "remote_url"
    assert len(proxy.asked) == 1


def test_missing_bucket_error_names_setting(proxy: FaultyProxy, credentials: None) -> None:
    store = open_remote("s3://nobody-made-this", RemoteOptions(proxy.endpoint))
    with pytest.raises(Unavailable, match="the bucket that remote_url names does not exist") as missing:
        store.put_bytes("packs/p", b"")
    assert missing.value.field == "remote_url"
    with pytest.raises(Unavailable, match="bucket"):
        keys(store, "packs/")


@pytest.mark.parametrize(
    ("url", "path"),
    [("gs://bucket/some/prefix", "/bucket/some/prefix/packs/p"), ("az://box/prefix", "/box/prefix/packs/p")],
)
def test_other_providers_use_their_own_paths(
    proxy: FaultyProxy, credentials: None, monkeypatch: pytest.MonkeyPatch, url: str, path: str
) -> None:
    for name in ("GOOGLE_SKIP_SIGNATURE", "AZURE_SKIP_SIGNATURE"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "dummy")
    proxy.decide = lambda asked: Fault(status=404)
    with pytest.raises(NotFound):
        read(open_remote(url, RemoteOptions(proxy.endpoint)).open_range("packs/p"), 5, 10)
    (asked,) = proxy.asked
    assert (asked.method, asked.path.replace("%2F", "/"), asked.begin, asked.end) == ("GET", path, 5, 15)
