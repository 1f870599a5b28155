"""Addresses of several schedulers: calls reach the active one; the pace of a stream's messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from tests.support.wait import HANG_S
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.addresses import join_address
from torchrelay.common.net.rpc.channels import SCHEDULER_SERVICE, open_blocking_channel, open_channel
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
