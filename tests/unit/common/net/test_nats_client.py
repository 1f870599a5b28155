"""Connections to the broker, streams on a server with little storage, and reports that end with their process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import nats.js.errors
import pytest
from nats.aio.transport import TcpTransport
from nats.js import JetStreamContext
from structlog.testing import capture_logs

from tests.support.brokers import free_port, nats_server, running
from tests.support.stalled_broker import assert_it_ends, stalled_client
from tests.support.wait import eventually
from torchrelay.cli.up.broker_programs import nats_program
from torchrelay.common.net import nats_client
from torchrelay.common.net.load_reports import POLL_EVERY_S, Cadence, publish_reports
from torchrelay.common.net.nats_client import (
    MIN_STREAM_BYTES,
    StreamSizes,
    Subjects,
    connect,
    ensure_streams,
    keep_streams,
)
from torchrelay.common.net.urls import with_credentials
from torchrelay.control.v1 import reports_pb2


async def test_warning_of_absent_broker_hides_password() -> None:
    with capture_logs() as logged:
        connecting = asyncio.create_task(
            nats_client.connect(f"nats://ann:hunter2@127.0.0.1:{free_port()},nats://127.0.0.1:{free_port()}", "test")
        )
        try:
            await eventually(lambda: logged, "a warning")
        finally:
            connecting.cancel()
            await asyncio.wait({connecting})
    assert logged[0]["event"] == "nats_unreachable" and "127.0.0.1" in str(logged)
    assert "hunter2" not in str(logged)


@pytest.mark.parametrize("user", ["ann", "ann b. > *", "ann@example.com"])
async def test_foreign_users_receive_replies(tmp_path: Path, user: str) -> None:
    secret = "p:@/w"
    users = f'authorization {{ users: [ {{ user: "{user}", password: "{secret}" }} ] }}'
    with nats_server(tmp_path, authorization=users) as url:
        client = await nats_client.connect(with_credentials(url, user, secret), "test")
        try:
            js = client.jetstream()
            await nats_client.ensure_streams(js, nats_client.Subjects())
            made = await js.stream_info(nats_client.HISTORY_STREAM)
            assert made.config.max_bytes == nats_client.MIN_STREAM_BYTES
        finally:
            await client.close()


async def test_close_does_not_wait_for_stalled_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "CLOSE_TIMEOUT_S", 0.1)
    async with stalled_client() as client, asyncio.timeout(60):
        await client.close()
        assert client.is_closed
        writer = cast(TcpTransport, client._transport)._io_writer
        assert writer is not None and writer.transport.is_closing()  # its socket is given back


async def test_flush_follows_what_was_subscribed(tmp_path: Path) -> None:
    sent = bytearray()
    relayed = asyncio.Event()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: bytearray) -> None:
        while data := await reader.read(1 << 16):
            copy.extend(data)
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(url)
        server_reader, server_writer = await asyncio.open_connection(parts.hostname, parts.port)
        await asyncio.gather(forward(reader, server_writer, sent), forward(server_reader, writer, bytearray()))
        relayed.set()

    with nats_server(tmp_path) as url:
        async with asyncio.timeout(60), await asyncio.start_server(relay, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            client = await nats_client.connect(f"nats://{host}:{port}", "test")
            sent.clear()
            await client.subscribe("reports")
            await client.flush()
            assert sent.startswith(b"SUB reports") and sent.endswith(b"PING\r\n")
            await client.close()
            await relayed.wait()


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
        command = (nats_program(), "-c", str(config), "-a", "127.0.0.1", "-p", str(self._port))
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


def test_disk_message_repeats_on_change_or_interval() -> None:
    cadence = Cadence()
    looks = [(number * POLL_EVERY_S, what) for number, what in enumerate("aaaaaaaaabcca")]
    said = [(round(now_s / POLL_EVERY_S), what) for now_s, what in looks if cadence.is_due(what, now_s)]
    assert said == [(0, "a"), (5, "a"), (9, "b"), (10, "c"), (12, "a")]


async def test_swallowed_cancel_ends_reports() -> None:
    async with stalled_client() as client:
        reports = publish_reports(client, "load", b"key", lambda: 0, lambda: reports_pb2.WorkerReport(worker_id="w"))
        await assert_it_ends(reports, client)
