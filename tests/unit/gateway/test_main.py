"""The gateway process: starts alone, keeps what it committed through kill -9, shuts down in order, and forks."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.wait import wait_until

ADMIN_KEY = f"tra-{'0' * 32}"


def _limited(num_descriptors: int | None) -> list[str]:
    return [] if num_descriptors is None else ["prlimit", f"--nofile={num_descriptors}"]


@contextmanager
def gateway(
    home: Path, nats_url: str, redis_url: str, num_descriptors: int | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A gateway process without scheduler, store or workers."""
    ready = home / "ready.json"
    ready.unlink(missing_ok=True)
    settings = {
        "admin-key": ADMIN_KEY,
        "database-url": f"sqlite:///{home}/ledger.db",
        "nats-url": nats_url,
        "nats-prefix": home.name,
        "redis-url": redis_url,
        "ready-file": str(ready),
        "heartbeat-s": "0.2",
        "scheduler-address": "127.0.0.1:1",
        "store-address": "127.0.0.1:1",
        "grace-s": "1",
        "cors-origins": "https://app.example",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    with (home / "gateway.log").open("ab") as log:
        process = subprocess.Popen(
            [*_limited(num_descriptors), str(Path(sys.executable).with_name("torchrelay-gateway")), *flags],
            stderr=log,
            stdout=log,
        )
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, "ready.json")
        assert process.poll() is None, (home / "gateway.log").read_text()[-2000:]
        yield process, json.loads(ready.read_text())
    finally:
        process.kill()
        process.wait()


def await_beat(home: Path, gateway_id: str, number: int) -> None:
    """Waits until the gateway has beaten ``number`` times, which nothing else that it does may delay."""
    query = "SELECT beat FROM gateways WHERE gateway_id = ?"
    with closing(sqlite3.connect(home / "ledger.db")) as ledger:
        wait_until(lambda: ledger.execute(query, (gateway_id,)).fetchone() >= (number,), "the heartbeat")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / f"t{secrets.token_hex(4)}"
    made.mkdir()
    return made


def test_keys_survive_sigkill_and_sigterm_ends_cleanly(home: Path, nats_url: str, redis_url: str) -> None:
    with gateway(home, nats_url, redis_url) as (process, addresses):
        first_id = addresses["gateway_id"]
        await_beat(home, first_id, 3)
        with httpx.Client(base_url=addresses["http"], trust_env=False) as client:
            admin = {"authorization": f"Bearer {ADMIN_KEY}"}
            assert client.post("/v1/tenants", json={"name": "acme"}, headers=admin).status_code == 201
            key = client.post("/v1/keys", json={"tenant": "acme"}, headers=admin).json()["key"]
            absent = client.post(
                "/v1/chat/completions",
                json={"model": "absent", "messages": [{"role": "user", "content": "?"}]},
                headers={"authorization": f"Bearer {key}"},
            )
            assert (absent.status_code, absent.json()["error"]["param"]) == (404, "model")
            asked = {"origin": "https://app.example", "access-control-request-method": "GET"}
            allowed = client.options("/v1/models", headers=asked)
            assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with gateway(home, nats_url, redis_url) as (process, addresses):
        assert addresses["gateway_id"] != first_id
        with httpx.Client(base_url=addresses["http"], trust_env=False) as client:
            reply = client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert (reply.status_code, reply.json()["data"]) == (200, [])
        with grpc.insecure_channel(addresses["grpc"]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            health = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert not (home / "ready.json").exists()
    errors = [line for line in (home / "gateway.log").read_text().splitlines() if "Traceback" in line]
    assert errors == []


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
