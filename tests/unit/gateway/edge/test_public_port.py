"""The public port between real gRPC clients and servers, and between raw sockets of which a side is slow."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.http2_client import (
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    call_headers,
    frame,
    header_block,
    http2_client,
)
from tests.support.wait import HANG_S, eventually
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.gateway.edge.frame_limits import MAX_FRAME_BYTES, STREAM_HEADER
from torchrelay.gateway.edge.grpc_limits import GrpcLimits
from torchrelay.gateway.edge.grpc_server import PublicGrpcServer, show_key
from torchrelay.gateway.edge.public_port import PublicPort

MB = 1 << 20
LIMITS = GrpcLimits(connections=100, streams=256, message_bytes=8 * MB, head_s=10.0, idle_s=60.0, silence_s=60.0)


class Echo:
    """``Unary`` returns the message; ``Stream`` sends as many messages of 80 bytes as it says, endless for 0."""

    def __init__(self) -> None:
        self.num_open = 0

    async def unary(self, message: bytes, _context: object) -> bytes:
        return message

    async def keyed(self, message: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        show_key(dict(context.invocation_metadata() or ())["tenant"])  # type: ignore[arg-type]
        return message

    async def stream(self, message: bytes, _context: object) -> AsyncIterator[bytes]:
        self.num_open += 1
        try:
            left = int(message)
            while left != 1:
                yield bytes(80)
                left -= 1
            yield b"last"
        finally:
            self.num_open -= 1

    async def until_cancelled(self, message: bytes, _context: object) -> AsyncIterator[bytes]:
        yield message
        await asyncio.Event().wait()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def server(echo: Echo) -> AsyncIterator[PublicGrpcServer]:
    server = PublicGrpcServer("127.0.0.1", 0, LIMITS)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(echo.unary),
        "Keyed": grpc.unary_unary_rpc_method_handler(echo.keyed),
        "Stream": grpc.unary_stream_rpc_method_handler(echo.stream),
        "Wait": grpc.unary_stream_rpc_method_handler(echo.until_cancelled),
    }
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: PublicGrpcServer) -> AsyncIterator[Any]:
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


@pytest.mark.parametrize("size", [0, 1, MAX_FRAME_BYTES, 7 * MB])
async def test_messages_of_any_size_come_back(channel: Any, size: int) -> None:
    assert await channel.unary_unary("/test.Echo/Unary")(b"x" * size, timeout=HANG_S) == b"x" * size


async def test_ordinary_traffic_is_no_flood(channel: Any) -> None:
    """For small messages the client sends many pings and window updates; thousands of calls share its connection."""

    async def read() -> int:
        return len([message async for message in channel.unary_stream("/test.Echo/Stream")(b"5000")])

    assert await asyncio.gather(*(read() for _ in range(4))) == [5000] * 4
    call = channel.unary_unary("/test.Echo/Unary")
    for _ in range(8):
        replies = await asyncio.gather(*(call(b"%d" % number, timeout=60) for number in range(LIMITS.streams)))
        assert replies == [b"%d" % number for number in range(LIMITS.streams)]


@pytest.mark.parametrize("number", ["", "two", "9" * 5000])
async def test_header_without_end_is_a_fault_of_its_call_alone(server: PublicGrpcServer, number: str) -> None:
    """The port adds a header, which becomes a part of the client's last one."""
    added = header_block([(STREAM_HEADER, "1")])

    def end() -> bytes:
        own = [(STREAM_HEADER, number)] if number else []
        with http2_client(f"127.0.0.1:{server.port}") as client:
            client.greet()
            open_ended = header_block([*call_headers("/test.Echo/Unary", *own), ("x-bin", added.decode("latin-1"))])
            client.sock.sendall(frame(HEADERS, END_HEADERS, 1, open_ended.removesuffix(added)))
            client.send_message(1, b"")
            return client.end_of(1)

    assert b"the headers of the call are malformed" in await asyncio.to_thread(end)


async def test_bytes_of_a_tenant_are_read_at_a_limited_rate(
    server: PublicGrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is shared by all connections of a tenant; other tenants are not slowed."""
    monkeypatch.setattr(f"{PublicPort.__module__}._BYTES_PER_S", 1.0)
    options = (("grpc.use_local_subchannel_pool", 1),)  # a connection for each channel
    async with AsyncExitStack() as stack:

        async def keyed(tenant: str) -> Callable[[bytes], Any]:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options))
            call: Callable[[bytes], Any] = partial(
                channel.unary_unary("/test.Echo/Keyed"), metadata=(("tenant", tenant),)
            )
            assert await call(b"key") == b"key"  # from now on the connection counts as the tenant's
            return call

        first, second, other = await keyed("a"), await keyed("a"), await keyed("b")
        large = bytes(200 << 10)
        assert await first(large) == large  # a burst
        for call in first, second:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await call(large)
        assert await other(large) == large


async def test_hundreds_of_calls_are_cancelled_at_once(channel: Any, echo: Echo) -> None:
    async def open_call() -> Any:
        while True:
            call = channel.unary_stream("/test.Echo/Stream")(b"0")
            try:
                await call.read()
                return call
            except grpc.aio.AioRpcError as error:
                # REFUSED_STREAM: grpcio still holds memory of cancelled calls, and a call may be repeated.
                assert "error code 7" in (error.details() or "")
                await asyncio.sleep(0.05)

    steady = channel.unary_stream("/test.Echo/Wait")(b"x")
    await steady.read()
    for _ in range(2):
        calls = await asyncio.gather(*(open_call() for _ in range(200)))
        for call in calls:
            call.cancel()
        await eventually(lambda: echo.num_open == 0)
    assert not steady.done()  # on the same connection
    steady.cancel()


async def test_status_of_an_oversized_message_reaches_the_client(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/test.Echo/Unary")(
            bytes(8 * MB - 20), metadata=(("x", "a" * 20_000),), timeout=HANG_S
        )
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_stop_cancels_streams_that_do_not_end_within_its_grace(server: PublicGrpcServer, channel: Any) -> None:
    call = channel.unary_stream("/test.Echo/Wait")(b"x")
    await call.read()
    await asyncio.wait_for(server.stop(0.1), HANG_S)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call.read()


async def test_stop_lets_streams_end_within_its_grace(server: PublicGrpcServer, channel: Any) -> None:
    call = channel.unary_stream("/test.Echo/Stream")(b"3000")
    await call.read()
    stopping, last = asyncio.create_task(server.stop(HANG_S)), b""
    while (message := await call.read()) is not grpc.aio.EOF:
        last = message
    assert last == b"last"
    await asyncio.wait_for(stopping, HANG_S)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


async def test_flood_ends_its_connection_with_the_cause(server: PublicGrpcServer, channel: Any) -> None:
    call = channel.unary_stream("/test.Echo/Wait")(b"x")
    await call.read()

    def attack() -> bytes:
        with http2_client(f"127.0.0.1:{server.port}") as client:
            client.greet()
            client.sock.sendall(
                frame(PING, payload=bytes(8)) * 900
            )  # read in one piece, so that no reset destroys the answer
            payload = next(payload for kind, _, _, payload in client.frames() if kind == GOAWAY)
            assert client.is_closed(HANG_S)
            return payload

    assert b"too many frames that carry nothing" in await asyncio.to_thread(attack)
    assert not call.done()
    call.cancel()


@asynccontextmanager
async def public_port(limits: GrpcLimits) -> AsyncIterator[PublicPort]:
    port = PublicPort(socket.create_server(("127.0.0.1", 0)), limits)
    await port.start()
    try:
        yield port
    finally:
        await port.stop_accepting()
        await port.close()


@pytest.fixture
async def port() -> AsyncIterator[PublicPort]:
    async with public_port(LIMITS) as port:
        yield port


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


async def listen(port: PublicPort, handler: Handler) -> asyncio.Server:
    """A server at the inner address, in place of grpcio's."""
    server = await asyncio.start_unix_server(handler, port.address.removeprefix("unix:"))
    port.hide_address()
    return server


SENT_BYTES, HELD_BYTES = 64 * MB, 24 * MB  # kernel buffers of two connections hold far less than what is sent


@pytest.mark.parametrize("is_client_slow", [True, False])
async def test_slow_reader_stops_the_sender_and_loses_nothing(port: PublicPort, is_client_slow: bool) -> None:
    num_sent, num_read, may_read = 0, 0, asyncio.Event()

    async def send(writer: asyncio.StreamWriter, piece: bytes) -> None:
        nonlocal num_sent
        while num_sent < SENT_BYTES:
            writer.write(piece)
            await writer.drain()
            num_sent += len(piece)
        writer.close()

    async def read(reader: asyncio.StreamReader) -> None:
        nonlocal num_read
        await may_read.wait()
        while data := await reader.read(MB):
            num_read += len(data)

    piece = frame(0, 0, 1, b"\xff" * MAX_FRAME_BYTES)  # of a message of 4 GB

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (send(writer, piece) if is_client_slow else read(reader))
        writer.close()

    async with await listen(port, serve), asyncio.TaskGroup() as group:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(PREFACE)
        group.create_task(read(reader) if is_client_slow else send(writer, piece))
        readings = [0]
        while readings[-1] == 0 or len(set(readings[-4:])) > 1:  # until nothing more is taken
            await asyncio.sleep(0.05)
            readings.append(num_sent)
        assert num_sent < HELD_BYTES
        may_read.set()
        await eventually(lambda: num_read >= num_sent >= SENT_BYTES)
        writer.close()


async def test_both_sides_end_together(port: PublicPort) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        if await reader.readexactly(len(PREFACE) + 9) and not ended.is_set():
            await reader.read()
            ended.set()
        writer.close()

    async with await listen(port, serve):
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(PREFACE)
        assert await reader.readexactly(5) == b"hello"
        writer.write(frame(SETTINGS))
        writer.close()
        await asyncio.wait_for(ended.wait(), HANG_S)  # the client closed
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(PREFACE + frame(SETTINGS))
        assert await asyncio.wait_for(reader.read(), HANG_S) == b"hello"  # the server closed after sending everything
        writer.close()


async def test_silent_client_is_closed_before_grpcio() -> None:
    reached: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(await reader.read(1))
        writer.close()

    async with public_port(replace(LIMITS, head_s=0.1)) as port, await listen(port, serve):
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        await eventually(lambda: port.num_connections == 1)
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        writer.close()
        assert port.num_connections == 0 and not reached


async def test_port_survives_a_lack_of_descriptors(port: PublicPort) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await listen(port, serve):
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        await eventually(lambda: port.num_connections == 1)
        before, spare = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))  # no descriptor is free
        try:
            writer.write(PREFACE)
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(PREFACE)
        assert await asyncio.wait_for(reader.read(), HANG_S) == b"hello"
        writer.close()


async def test_client_is_closed_while_grpcio_does_not_listen(port: PublicPort) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(PREFACE)
    assert await asyncio.wait_for(reader.read(), HANG_S) == b""
    writer.close()


async def send_without_end(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(bytes(MAX_FRAME_BYTES))
            await writer.drain()


async def test_client_that_reads_nothing_is_closed() -> None:
    """The port, which no longer reads from grpcio, must notice this itself."""
    async with public_port(replace(LIMITS, silence_s=0.1)) as port, await listen(port, send_without_end):
        with socket.create_connection(("127.0.0.1", port.port)) as client:
            client.sendall(PREFACE)
            await eventually(lambda: port.num_connections == 1)
            await eventually(lambda: port.num_connections == 0)
            client.settimeout(HANG_S)
            while client.recv(MB):  # the rest of the kernel's buffers
                pass


async def test_client_that_reads_on_in_time_stays(port: PublicPort) -> None:
    num_pieces = 512

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(num_pieces):
            writer.write(bytes(MAX_FRAME_BYTES))
            await writer.drain()
        await reader.readexactly(len(PREFACE) + len(frame(SETTINGS)))
        writer.write(b"still here")
        writer.close()

    async with await listen(port, serve):
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(PREFACE)
        await eventually(lambda: any(client.other and client._timer for client in port._clients.values()))
        (client,) = port._clients.values()  # which its timer would close
        await reader.readexactly(num_pieces * MAX_FRAME_BYTES)
        await eventually(lambda: client._timer is None)
        writer.write(frame(SETTINGS))
        assert await asyncio.wait_for(reader.read(), HANG_S) == b"still here"
        writer.close()


async def test_inner_address_is_hidden_from_other_users(port: PublicPort) -> None:
    folder = Path(port.address.removeprefix("unix:")).parent.resolve()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    async with await listen(port, send_without_end):
        assert not folder.exists()  # a killed process leaves nothing behind
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(PREFACE)
        assert await reader.readexactly(MAX_FRAME_BYTES)
        writer.close()


async def test_client_socket_names_are_unpredictable(port: PublicPort) -> None:
    """Every process can list them, and none may bind the next name in advance."""
    names: list[bytes] = []

    async def note_name(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        names.append(writer.get_extra_info("peername").removeprefix(b"\0torchrelay-"))
        writer.close()

    async with await listen(port, note_name):
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(PREFACE)
            with suppress(ConnectionResetError):  # it is not read
                assert await asyncio.wait_for(reader.read(), HANG_S) == b""
            writer.close()
    assert all(len(name) >= 32 for name in names)
    assert names[0][:16] != names[1][:16]


async def test_long_temporary_folder_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix socket's address has at most 107 bytes."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    server = PublicGrpcServer("127.0.0.1", 0, LIMITS)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(0)
    assert list(folder.iterdir()) == []


async def test_fault_in_accepting_reaches_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_port: PublicPort, sock: socket.socket, _address: str) -> None:
        sock.close()
        raise ValueError("an unexpected fault")

    monkeypatch.setattr(PublicPort, "_connect", fail)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(HANG_S), public_port(LIMITS) as port:
            with socket.create_connection(("127.0.0.1", port.port)):
                await asyncio.Event().wait()
    assert caught.group_contains(ValueError, match="unexpected fault")
