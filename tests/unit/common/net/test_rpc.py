"""Errors keep their class, field and retry time over gRPC; who calls is checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from torchrelay.common.errors import (
    CallerRefused,
    CallerUnknown,
    QueueFull,
    TorchrelayError,
    Unavailable,
    UploadRefused,
    error_class,
)
from torchrelay.common.identity.callers import Caller, call_token
from torchrelay.common.net.rpc.channels import open_blocking_channel, open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc, logged_cause
from torchrelay.common.net.rpc.server import RpcServer
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import param_store_pb2_grpc

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
