"""Small files are read once from the store, verified, and kept on disk within a limit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.echo_services import EchoStore
from torchrelay.common.errors import DataCorrupted, Overloaded
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.inference.text.model_files import ModelFiles
from torchrelay.gateway.inference.text.processes.frames import TOKENIZER, TOKENIZER_CONFIG, FileId

ENCODED = [bytes([index]) * 1000 for index in range(4)]
DIGESTS = [blake3(data).hexdigest() for data in ENCODED]
IDS: list[FileId] = [(TOKENIZER, digest) for digest in DIGESTS]


@pytest.fixture
async def store() -> AsyncIterator[EchoStore]:
    store = EchoStore(dict(zip(DIGESTS, ENCODED, strict=True)))
    await store.start()
    yield store
    await store.stop()


@pytest.fixture
async def reader(store: EchoStore) -> AsyncIterator[StoreFileReader]:
    async with AsyncExitStack() as stack:
        channel = open_channel(store.address)
        stack.push_async_callback(channel.close)
        yield StoreFileReader(ParamStoreStub(channel), store.address)


async def contents(files: ModelFiles, wanted: list[FileId], tenant: str = "acme") -> list[bytes]:
    async with files.held(tenant, wanted) as held:
        assert [file.id for file in held] == wanted
        assert all(file.num_bytes == 1000 for file in held)
        return [file.path.read_bytes() for file in held]


async def test_concurrent_requests_share_one_read(store: EchoStore, reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files:
        read = await asyncio.gather(*(contents(files, IDS[:2]) for _ in range(10)))
        assert read == [ENCODED[:2]] * 10
        assert sorted(store.reads) == sorted(DIGESTS[:2])


async def test_tenants_do_not_wait_for_each_others_reads(store: EchoStore, reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files:
        read = await asyncio.gather(*(contents(files, IDS[:1], tenant) for tenant in ("acme", "beta") * 3))
        assert read == [ENCODED[:1]] * 6
        assert 1 <= len(store.reads) <= 2


async def test_least_recently_used_file_goes_unless_held(store: EchoStore, reader: StoreFileReader) -> None:
    async with ModelFiles(reader, max_bytes=2000) as files:
        async with files.held("acme", IDS[:1]) as held:
            for file_id in IDS[1:]:
                await contents(files, [file_id])
            assert held[0].path.exists()
            assert len(list(held[0].path.parent.iterdir())) == 2
        store.reads.clear()
        await contents(files, [IDS[3], IDS[0]])
        assert store.reads == []
        await contents(files, [IDS[1]])
        assert store.reads == [DIGESTS[1]]


async def test_held_files_that_fill_the_cache_cause_overload(reader: StoreFileReader) -> None:
    async with ModelFiles(reader, max_bytes=2000) as files:
        async with files.held("acme", IDS[:2]) as held:
            with pytest.raises(Overloaded, match="too many models' files are in use"):
                await contents(files, IDS[2:3], "beta")
            assert len(list(held[0].path.parent.iterdir())) == 2
        assert await contents(files, IDS[2:3], "beta") == ENCODED[2:3]


async def test_equal_bytes_under_two_names_are_two_files(reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files:
        assert await contents(files, [IDS[0], (TOKENIZER_CONFIG, DIGESTS[0])]) == [ENCODED[0]] * 2


async def test_damaged_file_is_refused_and_not_kept(store: EchoStore, reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files:
        store.files[DIGESTS[0]] = ENCODED[1]
        with pytest.raises(DataCorrupted, match=r"tokenizer\.json does not match"):
            await contents(files, IDS[:1])
        store.files[DIGESTS[0]] = ENCODED[0]
        assert await contents(files, IDS[:1]) == ENCODED[:1]


def is_folder(path: Path) -> bool:
    return path.is_dir()


async def test_folder_is_removed_with_the_gateway(reader: StoreFileReader) -> None:
    async with ModelFiles(reader) as files, files.held("acme", IDS[:1]) as held:
        folder = held[0].path.parent
        assert is_folder(folder)
    assert not is_folder(folder)


_KILLED = """
import asyncio, os, signal
from torchrelay.gateway.inference.text.model_files import ModelFiles

async def main():
    async with ModelFiles(None) as files:
        (files._folder / "file").write_bytes(bytes(1000))
        print(files._folder, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def folder_of_a_killed_gateway(environment: dict[str, str]) -> Path:
    killed = subprocess.run([sys.executable, "-c", _KILLED], env=environment, stdout=subprocess.PIPE, check=False)
    leftover = Path(killed.stdout.decode().strip())
    assert (leftover / "file").stat().st_size == 1000
    return leftover


async def test_leftover_folders_are_removed_and_used_ones_stay(
    reader: StoreFileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftover = folder_of_a_killed_gateway({**os.environ, "TMPDIR": str(tmp_path)})
    assert os.listdir(tmp_path) == [leftover.name]
    async with ModelFiles(reader) as files:
        assert leftover.name not in os.listdir(tmp_path)
        async with ModelFiles(reader) as others:
            assert await contents(files, IDS[:1]) == await contents(others, IDS[:1]) == ENCODED[:1]
        assert await contents(files, IDS[:2]) == ENCODED[:2]
    assert os.listdir(tmp_path) == []
