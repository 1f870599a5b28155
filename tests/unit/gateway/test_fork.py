"""The gateway's library settings: gRPC's fork handlers and engine."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import asyncio
import torchrelay.gateway.main
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.server import RpcServer

async def main():
    server = RpcServer("127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(10):
            calls = asyncio.gather(*(stub.Check(health_pb2.HealthCheckRequest()) for _ in range(20)))
            child = await asyncio.create_subprocess_exec("true")
            assert await child.wait() == 0
            await calls
    await server.stop()

uvloop.run(main())
"""


def test_grpc_leaves_children_of_the_event_loop_alone() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "fork() handlers" not in done.stderr
    assert "experiment" not in done.stderr.lower()  # gRPC warns about unknown names
