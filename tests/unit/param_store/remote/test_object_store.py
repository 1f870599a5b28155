"""An object store as remote store: a real S3 protocol server, and where requests go for the other providers."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.s3_server import Fault, FaultyProxy
from torchrelay.common.errors import DataCorrupted, InvalidRequest, NotFound, Unavailable
from torchrelay.param_store.remote.remote_store import RemoteOptions, RemoteStore, open_remote

MIB = 1 << 20


@pytest.fixture
def store(bucket_url: str, proxy: FaultyProxy) -> RemoteStore:
    return open_remote(bucket_url, RemoteOptions(proxy.endpoint, timeout_s=2.0, give_up_s=0.5))


def read(store: RemoteStore, key: str, offset: int, size: int) -> bytes:
    reader, memory = store.open_range(key), bytearray(size)
    reader.read_into(offset, memoryview(memory), threading.Event())
    reader.close()
    return bytes(memory)


def test_objects_are_put_read_listed_and_deleted(tmp_path: Path, store: RemoteStore) -> None:
    (tmp_path / "a").write_bytes(b"from a file")
    store.put_file("packs/a", tmp_path / "a")
    store.put_file("packs/a", tmp_path / "a")
    store.put_bytes("packs/b", b"from memory")
    store.put_bytes("files/c", b"")
    assert store.get_bytes("packs/a") == b"from a file"
    assert store.size("packs/b") == 11
    assert [stored.key for stored in store.objects("packs/")] == ["packs/a", "packs/b"]
    assert [stored.key for stored in store.objects("versions/")] == []
    store.delete("packs/a")
    store.delete("packs/a")
    assert [stored.key for stored in store.objects("packs/")] == ["packs/b"]
    for absent in (store.get_bytes, store.size, lambda key: read(store, key, 0, 1)):
        with pytest.raises(NotFound, match="the remote store has no packs/a"):
            absent("packs/a")


def test_pack_stored_in_parts_and_read_in_ranges(tmp_path: Path, store: RemoteStore, proxy: FaultyProxy) -> None:
    data = os.urandom(18 * MIB + 100)
    (tmp_path / "pack").write_bytes(data)
    store.put_file("packs/p", tmp_path / "pack")
    parts = [asked.path for asked in proxy.asked if asked.method == "PUT" and "partNumber" in asked.path]
    assert len(parts) == 3
    reader, memory = store.open_range("packs/p"), memoryview(bytearray(len(data)))
    with ThreadPoolExecutor(4) as pool:
        begins = range(0, len(data), MIB)
        list(pool.map(lambda at: reader.read_into(at, memory[at : at + MIB], threading.Event()), begins))
    assert bytes(memory) == data


def test_ranges_read_at_any_alignment_up_to_end(store: RemoteStore) -> None:
    data = os.urandom(10_000)
    store.put_bytes("packs/p", data)
    for offset, size in ((0, 10_000), (1, 1), (4096, 5904), (9999, 1)):
        assert read(store, "packs/p", offset, size) == data[offset : offset + size]
    with pytest.raises(DataCorrupted, match="packs/p of the remote store ends at byte 10000"):
        read(store, "packs/p", 9000, 2000)
    with pytest.raises(DataCorrupted, match="packs/p of the remote store is shorter than its manifest says"):
        read(store, "packs/p", 20_000, 10)


def test_put_retried_after_server_error(tmp_path: Path, store: RemoteStore, proxy: FaultyProxy) -> None:
    faults = [Fault(status=500), Fault(status=503)]
    proxy.decide = lambda asked: faults.pop() if faults else None
    (tmp_path / "pack").write_bytes(b"x" * 9 * MIB)
    store.put_file("packs/p", tmp_path / "pack")
    assert (faults, store.size("packs/p")) == ([], 9 * MIB)


def test_permanently_broken_server_given_up(store: RemoteStore, proxy: FaultyProxy) -> None:
    proxy.decide = lambda asked: Fault(status=500)
    for broken in (
        store.get_bytes,
        store.size,
        store.delete,
        lambda key: [stored.key for stored in store.objects(f"{key}/")],
    ):
        with pytest.raises(Unavailable, match=r"the remote store does not serve packs/p.*500 Internal Server Error$"):
            broken("packs/p")


@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_error_names_settings(store: RemoteStore, proxy: FaultyProxy, status: int) -> None:
    proxy.decide = lambda asked: Fault(status=status)
    with pytest.raises(Unavailable, match=r"check remote_url and the credentials .*AWS_ACCESS_KEY_ID") as denied:
        store.get_bytes("packs/p")
    assert denied.value.field == "remote_url"
    assert len(proxy.asked) == 1


def test_missing_bucket_error_names_setting(proxy: FaultyProxy, credentials: None) -> None:
    store = open_remote("s3://nobody-made-this", RemoteOptions(proxy.endpoint))
    with pytest.raises(Unavailable, match="the bucket that remote_url names does not exist") as missing:
        store.put_bytes("packs/p", b"")
    assert missing.value.field == "remote_url"
    with pytest.raises(Unavailable, match="bucket"):
        [stored.key for stored in store.objects("packs/")]


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
        read(open_remote(url, RemoteOptions(proxy.endpoint)), "packs/p", 5, 10)
    (asked,) = proxy.asked
    assert (asked.method, asked.path.replace("%2F", "/"), asked.begin, asked.end) == ("GET", path, 5, 15)


@pytest.mark.parametrize("url", ["s3:", "s3:///key", "az://", "gs:bucket"])
def test_url_without_bucket_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_remote(url)
    assert refused.value.field == "remote_url"
