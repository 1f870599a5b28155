"""Files of tenants over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.param_store.running_store import RunningStore, refusal, running_store
from torchrelay.common.errors import InvalidRequest, NotFound
from torchrelay.control.v1 import param_store_pb2 as pb


def put_parts(name: str, data: bytes, max_bytes: int) -> Iterator[pb.PutObjectRequest]:
    opening = pb.PutObjectRequest.Open(object=pb.ObjectName(tenant_id="ten-1", name=name), max_bytes=max_bytes)
    yield pb.PutObjectRequest(open=opening)
    for begin in range(0, len(data), 1 << 20):
        yield pb.PutObjectRequest(data=data[begin : begin + (1 << 20)])


async def put(store: RunningStore, name: str, data: bytes, max_bytes: int = 1 << 30) -> int:
    return (await store.stub.PutObject(put_parts(name, data, max_bytes))).num_bytes


async def read(store: RunningStore, name: str, offset: int, num_bytes: int, tenant_id: str = "ten-1") -> bytes:
    named = pb.ObjectName(tenant_id=tenant_id, name=name)
    return (await store.stub.ReadObject(pb.ReadObjectRequest(object=named, offset=offset, num_bytes=num_bytes))).data


async def test_file_is_put_read_in_parts_replaced_and_deleted(tmp_path: Path) -> None:
    data = bytes(range(256)) * 12_000
    async with running_store(tmp_path) as store:
        assert await put(store, "file-1", data) == len(data)
    async with running_store(tmp_path) as store:
        assert await read(store, "file-1", 5000, 1 << 20) == data[5000 : 5000 + (1 << 20)]
        assert isinstance(await refusal(read(store, "file-1", 0, 10, tenant_id="ten-2")), NotFound)
        await put(store, "file-1", b"other")
        assert await read(store, "file-1", 0, 5) == b"other"
        await store.stub.DeleteUnnamed(pb.DeleteUnnamedRequest(older_than_s=0))
        assert await read(store, "file-1", 0, 5) == b"other"
        for _ in range(2):
            await store.stub.DeleteObject(pb.ObjectName(tenant_id="ten-1", name="file-1"))
        assert isinstance(await refusal(read(store, "file-1", 0, 5)), NotFound)


async def test_file_that_is_too_large_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store:
        assert isinstance(await refusal(put(store, "file-1", bytes(3 << 20), max_bytes=2 << 20)), InvalidRequest)
        assert isinstance(await refusal(read(store, "file-1", 0, 5)), NotFound)
        assert not list(store.settings.data_dir.glob("object-*"))
        (store.settings.data_dir / "object-x").touch()  # as a killed store leaves it
    async with running_store(tmp_path) as store:
        assert not list(store.settings.data_dir.glob("object-*"))


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "x" * 101])
async def test_name_cannot_leave_the_folder_of_its_tenant(tmp_path: Path, name: str) -> None:
    async with running_store(tmp_path) as store:
        assert isinstance(await refusal(put(store, name, b"x")), InvalidRequest)
        assert isinstance(await refusal(read(store, name, 0, 1)), InvalidRequest)
