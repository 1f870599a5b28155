"""Calls: they reach the active scheduler, keep the class of an error, and are checked; the pace of messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.wait import HANG_S
from torchrelay.common.errors import (
    CallerRefused,
    CallerUnknown,
    InvalidRequest,
    QueueFull,
    TorchrelayError,
    Unavailable,
    UploadRefused,
    error_class,
)
from torchrelay.common.host.addresses import join_address
from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.net.rpc.channels import SCHEDULER_SERVICE, open_blocking_channel, open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc, logged_cause
from torchrelay.common.net.rpc.message_pace import MessagePace
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import param_store_pb2_grpc


class NamedServicer(param_store_pb2_grpc.ParamStoreServicer):
    """Answers with its name."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    async def ReadFile(self, request: pb.ReadFileRequest, context: object) -> AsyncIterator[pb.FileBytes]:
        yield pb.FileBytes(data=self._name)


@asynccontextmanager
async def servers(*names: str, host: str = "127.0.0.1") -> AsyncIterator[dict[str, RpcServer]]:
    """Servers on loopback, of which the first is active."""
    async with AsyncExitStack() as stack:
        running = {name: RpcServer(host) for name in names}
        for name, server in running.items():
            servicer = cast(Any, NamedServicer)(name)
            param_store_pb2_grpc.add_ParamStoreServicer_to_server(servicer, server.server)
            await server.set_serving(SCHEDULER_SERVICE, name == names[0])
            await server.start()
            stack.push_async_callback(server.stop, 0)
        yield running


def list_of(running: dict[str, RpcServer], host: str = "127.0.0.1") -> str:
    return ", ".join(join_address(host, server.port) for server in running.values())


async def answer(channel: grpc.aio.Channel) -> str:
    """The name of the server that answers."""
    stub: Any = param_store_pb2_grpc.ParamStoreStub(channel)
    parts = [part.data async for part in stub.ReadFile(pb.ReadFileRequest(), wait_for_ready=True, timeout=HANG_S)]
    return bytes(parts[0]).decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_calls_reach_only_active_server(host: str) -> None:
    async with servers("a", "b", "c", host=host) as running, open_channel(list_of(running, host)) as channel:
        assert {await answer(channel) for _ in range(9)} == {"a"}


async def test_calls_follow_active_server() -> None:
    async with servers("a", "b") as running, open_channel(list_of(running)) as channel:
        assert await answer(channel) == "a"
        await running["a"].stop(0)
        async with asyncio.timeout(HANG_S):  # a call that begins before the channel sees the end would fail with it
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        waiting = asyncio.create_task(answer(channel))
        await running["b"].set_serving(SCHEDULER_SERVICE, True)
        assert await waiting == "b"


async def test_calls_fail_while_no_server_is_active() -> None:
    async with servers("a", "b") as running, open_channel(list_of(running)) as channel:
        await running["a"].set_serving(SCHEDULER_SERVICE, False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [part async for part in param_store_pb2_grpc.ParamStoreStub(channel).ReadFile(pb.ReadFileRequest())]
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_name_resolves_to_active_server() -> None:
    async with servers("a") as running:
        async with open_channel(f"dns:///localhost:{running['a'].port}") as channel:
            assert await answer(channel) == "a"
        await running["a"].set_serving(SCHEDULER_SERVICE, False)
        async with open_channel(f"dns:///localhost:{running['a'].port}") as channel:
            waiting = asyncio.create_task(answer(channel))
            await running["a"].set_serving(SCHEDULER_SERVICE, True)
            assert await waiting == "a"


async def test_single_address_is_used_without_health_check() -> None:
    async with servers("a", "b") as running, open_channel(f"127.0.0.1:{running['b'].port}") as channel:
        assert await answer(channel) == "b"


async def test_blocking_channel_reaches_only_active_server() -> None:
    async with servers("a", "b") as running:

        def names() -> set[bytes]:
            with open_blocking_channel(list_of(running)) as channel:
                read: Any = param_store_pb2_grpc.ParamStoreStub(channel).ReadFile
                calls = [read(pb.ReadFileRequest(), wait_for_ready=True, timeout=HANG_S) for _ in range(6)]
                return {part.data for call in calls for part in call}

        assert await asyncio.to_thread(names) == {b"a"}


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("scheduler-0:7101,scheduler-1:7101", "use dns:///NAME:PORT"),
        ("127.0.0.1:7101,127.0.0.2", "not each as IP:port"),
        ("127.0.0.1:7101,", "not each as IP:port"),
        ("127.0.0.1:7101,[::1]:7101", "mixes IPv4 and IPv6"),
    ],
)
async def test_unusable_list_is_refused(address: str, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault) as refused:
        open_channel(address)
    assert refused.value.field == "scheduler_address"


async def is_at_once(pace: MessagePace) -> bool:
    try:
        async with asyncio.timeout(0):
            await pace.wait()
    except TimeoutError:
        return False
    return True


def times_of_messages(pace: MessagePace, count: int, now_s: float) -> list[float]:
    """The times at which messages go that are all ready at ``now_s``."""
    times = []
    for _ in range(count):
        now_s += max(0.0, pace.left_s(now_s))
        pace.note_sent(now_s)
        times.append(now_s)
    return times


@pytest.mark.parametrize("at_once", [1, 4])
async def test_first_messages_go_at_once(at_once: int) -> None:
    pace = MessagePace(every_s=60.0, at_once=at_once)
    assert [await is_at_once(pace) for _ in range(at_once + 2)] == [True] * at_once + [False] * 2


def test_further_messages_are_evenly_paced() -> None:
    times = times_of_messages(MessagePace(every_s=0.5), 10, now_s=100.0)
    assert times == [100.0] * 4 + [100.5, 101.0, 101.5, 102.0, 102.5, 103.0]


def test_silence_allows_only_first_messages_at_once() -> None:
    pace = MessagePace(every_s=0.5, at_once=2)
    assert times_of_messages(pace, 3, now_s=100.0) == [100.0, 100.0, 100.5]
    assert times_of_messages(pace, 3, now_s=103.0) == [103.0, 103.0, 103.5]  # five turns passed unused


KEY = b"k" * 32


class RefusingStore(param_store_pb2_grpc.ParamStoreServicer):
    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.DescribeReply:
        raise UploadRefused("config.json has no hidden_size", field="config.json")

    async def ReadFile(self, request: pb.ReadFileRequest, context: object) -> AsyncIterator[pb.FileBytes]:
        yield pb.FileBytes(data=b"first")
        raise QueueFull("too many readers", retry_after_s=2.5)


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1")
    param_store_pb2_grpc.add_ParamStoreServicer_to_server(cast(Any, RefusingStore)(), server.server)
    await server.start()
    yield server
    await server.stop(0)


async def test_unary_error_keeps_class_and_field(server: RpcServer) -> None:
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await param_store_pb2_grpc.ParamStoreStub(channel).Describe(pb.DescribeRequest())
    error = error_from_rpc(caught.value)
    assert isinstance(error, UploadRefused)
    assert (error.message, error.field) == ("config.json has no hidden_size", "config.json")


async def test_stream_error_follows_messages(server: RpcServer) -> None:
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for part in param_store_pb2_grpc.ParamStoreStub(channel).ReadFile(pb.ReadFileRequest()):
                received.append(part.data)
    error = error_from_rpc(caught.value)
    assert received == [b"first"]
    assert isinstance(error, QueueFull) and error.retry_after_s == 2.5


async def test_absent_server_error_hides_address() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await param_store_pb2_grpc.ParamStoreStub(channel).Describe(pb.DescribeRequest())
    error = error_from_rpc(caught.value)
    assert isinstance(error, Unavailable) and error.message == "the peer cannot be reached"
    assert logged_cause(error) == error.message
    error.__cause__ = caught.value  # as of ``raise error_from_rpc(caught) from caught``
    assert "the peer cannot be reached: " in logged_cause(error) and "127.0.0.1:1" in logged_cause(error)


@pytest.fixture
async def guarded() -> AsyncIterator[str]:
    """The address of a node that checks who calls."""
    server = RpcServer("127.0.0.1", node_key=KEY)
    param_store_pb2_grpc.add_ParamStoreServicer_to_server(cast(Any, RefusingStore)(), server.server)
    service = "/torchrelay.control.v1.ParamStore"
    server.allow({f"{service}/Describe": {Caller.GATEWAY}, f"{service}/ReadFile": {Caller.GATEWAY, Caller.WORKER}})
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


@pytest.mark.parametrize(
    ("token", "error"),
    [
        ("", CallerUnknown),
        (call_token(b"another node's key", Caller.GATEWAY), CallerUnknown),
        (call_token(KEY, Caller.WORKER), CallerRefused),
        (call_token(KEY, Caller.GATEWAY), UploadRefused),  # served
    ],
)
async def test_caller_is_checked_at_each_call(guarded: str, token: str, error: type[TorchrelayError]) -> None:
    async with open_channel(guarded, token=token) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await param_store_pb2_grpc.ParamStoreStub(channel).Describe(pb.DescribeRequest())
    assert type(error_from_rpc(caught.value)) is error

    def describe() -> None:
        with open_blocking_channel(guarded, token=token) as channel:
            param_store_pb2_grpc.ParamStoreStub(channel).Describe(pb.DescribeRequest(), timeout=20)

    with pytest.raises(grpc.RpcError) as blocking:
        await asyncio.to_thread(describe)
    assert cast(grpc.Call, blocking.value).code() is caught.value.code()


async def test_stream_of_refused_caller_is_empty(guarded: str) -> None:
    received = []
    for caller, error in ((Caller.CLI, CallerRefused), (Caller.WORKER, QueueFull)):
        async with open_channel(guarded, token=call_token(KEY, caller)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for part in param_store_pb2_grpc.ParamStoreStub(channel).ReadFile(pb.ReadFileRequest()):
                    received.append((caller, part.data))
        assert type(error_from_rpc(caught.value)) is error
    assert received == [(Caller.WORKER, b"first")]


async def test_health_is_open_to_all(guarded: str) -> None:
    async with open_channel(guarded) as channel:
        reply = await cast(Any, health_pb2_grpc.HealthStub(channel)).Check(health_pb2.HealthCheckRequest())
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_every_code_names_one_class() -> None:
    assert error_class("queue_full") is QueueFull
    assert error_class("a code of a later version") is TorchrelayError


@pytest.mark.parametrize("field", ["模型.safetensors", "tab\tname", "\udce9.bin", "é" * 5000, "a" * 5000])
async def test_any_field_name_keeps_error_class(field: str) -> None:
    class Refusing(param_store_pb2_grpc.ParamStoreServicer):
        async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.DescribeReply:
            raise UploadRefused(f"refused: {field}".encode(errors="replace").decode(), field=field)

    server = RpcServer("127.0.0.1")
    param_store_pb2_grpc.add_ParamStoreServicer_to_server(cast(Any, Refusing)(), server.server)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await param_store_pb2_grpc.ParamStoreStub(channel).Describe(pb.DescribeRequest())
    await server.stop(0)
    error = error_from_rpc(caught.value)
    assert isinstance(error, UploadRefused) and error.message.startswith("refused: ")
    shown = field.encode(errors="replace").decode()
    assert error.field and shown.startswith(error.field) and len(error.field.encode()) >= min(len(shown.encode()), 1023)
