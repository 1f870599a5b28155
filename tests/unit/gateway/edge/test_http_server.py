from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.support.wait import HANG_S
from torchrelay.common.host.addresses import join_address
from torchrelay.gateway.edge.http_server import HttpLimits, http_server


def slow_app(started: asyncio.Event, go_on: asyncio.Event) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        started.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"last"})

    return app


async def test_shutdown_finishes_responses_and_refuses_connections() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    async with httpx.AsyncClient(trust_env=False) as client:
        async with http_server(slow_app(started, go_on), "127.0.0.1", 0, drain_s=5) as server:
            url = f"http://127.0.0.1:{server.port}/"
            running = asyncio.create_task(client.get(url))
            await started.wait()
            server.stop_accepting()
            asyncio.get_running_loop().call_soon(go_on.set)
        assert (await running).content == b"first last"
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


@pytest.mark.parametrize(("host", "callers"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])])
async def test_ipv6_is_served(host: str, callers: list[str]) -> None:
    go_on = asyncio.Event()
    go_on.set()
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        http_server(slow_app(asyncio.Event(), go_on), host, 0, drain_s=5) as server,
    ):
        for caller in callers:
            assert (await client.get(f"http://{join_address(caller, server.port)}/")).content == b"first last"


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such timeout")
async def test_client_that_reads_nothing_is_disconnected() -> None:
    ended = asyncio.Event()

    async def endless(_scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        ended.set()

    async with http_server(endless, "127.0.0.1", 0, drain_s=1, limits=HttpLimits(stall_s=0.5)) as server:
        reader = socket.create_connection(("127.0.0.1", server.port))
        reader.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(ended.wait(), HANG_S)
        (listening,) = server.servers[0].sockets  # connections inherit its options
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 500
        reader.close()


async def test_endless_response_is_cancelled_after_the_drain() -> None:
    started = asyncio.Event()
    async with httpx.AsyncClient(trust_env=False) as client:
        async with http_server(slow_app(started, asyncio.Event()), "127.0.0.1", 0, drain_s=1) as server:
            running = asyncio.create_task(client.get(f"http://127.0.0.1:{server.port}/"))
            await started.wait()
        with contextlib.suppress(httpx.HTTPError):
            await running
        assert running.done()
