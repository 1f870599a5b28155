"""Streams on a NATS server with little storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats.js.errors
import pytest
from nats.js import JetStreamContext

from tests.support.brokers import broker_program, free_port, running
from torchrelay.common.net.nats_client import (
    MIN_STREAM_BYTES,
    StreamSizes,
    Subjects,
    connect,
    ensure_streams,
    keep_streams,
)

SUBJECTS = Subjects()
WANTED = StreamSizes(history_bytes=8 << 20, usage_bytes=64 << 20)


class SmallServer:
    """A NATS server whose storage can be given another size by a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"nats://127.0.0.1:{self._port}"

    @asynccontextmanager
    async def storing(self, num_mb: int) -> AsyncIterator[JetStreamContext]:
        config = self._folder / "nats.conf"
        config.write_text(f'jetstream {{ store_dir: "{self._folder / "js"}", max_file_store: {num_mb}MB }}\n')
        command = (broker_program("nats-server"), "-c", str(config), "-a", "127.0.0.1", "-p", str(self._port))
        with running(command, self._folder / "nats.log", self._port):
            client = await connect(self.url, "test")
            try:
                yield client.jetstream()
            finally:
                await client.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SmallServer]:
    yield SmallServer(tmp_path)


async def sizes_of(js: JetStreamContext) -> StreamSizes:
    history = (await js.stream_info(SUBJECTS.history_stream)).config.max_bytes
    usage = (await js.stream_info(SUBJECTS.usage_stream)).config.max_bytes
    return StreamSizes(history or 0, usage or 0)


async def test_streams_shrink_to_storage_and_grow_later(server: SmallServer) -> None:
    async with server.storing(20) as js:
        assert not await ensure_streams(js, SUBJECTS, sizes=WANTED)
        assert await sizes_of(js) == StreamSizes(history_bytes=4 << 20, usage_bytes=16 << 20)
        await js.publish(SUBJECTS.usage("gw"), b"kept")
    async with server.storing(100) as js:
        keeping = asyncio.create_task(keep_streams(js, SUBJECTS, 1, WANTED, every_s=0.05))
        async with asyncio.timeout(60):
            while await sizes_of(js) != WANTED:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        keeping.cancel()
        assert (await js.get_last_msg(SUBJECTS.usage_stream, SUBJECTS.usage("gw"))).data == b"kept"


async def test_server_without_storage_raises(server: SmallServer) -> None:
    async with server.storing(1) as js:
        with pytest.raises(nats.js.errors.APIError, match="storage"):
            await ensure_streams(js, SUBJECTS, sizes=WANTED)


async def test_streams_without_sizes_are_unchanged(server: SmallServer) -> None:
    async with server.storing(100) as js:
        await ensure_streams(js, SUBJECTS)
        assert await sizes_of(js) == StreamSizes(MIN_STREAM_BYTES, MIN_STREAM_BYTES)
        assert await ensure_streams(js, SUBJECTS, sizes=WANTED)
        await ensure_streams(js, SUBJECTS)
        assert await sizes_of(js) == WANTED


async def test_streams_have_requested_replicas(tmp_path: Path) -> None:
    async with SmallServer(tmp_path).storing(100) as js:
        await ensure_streams(js, SUBJECTS, 1, WANTED)
        with pytest.raises(nats.js.errors.APIError, match="replicas > 1 not supported in non-clustered mode"):
            await ensure_streams(js, SUBJECTS, 3, WANTED)
