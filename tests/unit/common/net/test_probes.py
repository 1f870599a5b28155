"""Probes of real servers, alive, stopped and gone; output and status of the health check."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.brokers import free_port, listening, nats_server, redis_server
from tests.support.certificates import Authority
from torchrelay.cli.up.broker_programs import nats_program
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net import health_check
from torchrelay.common.net.probes import GrpcProbe, HttpProbe, NatsProbe, Probe, RedisProbe
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.server import RpcServer

HTTP_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = b"unavailable"
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextmanager
def http_server(folder: Path) -> Iterator[str]:
    with listening(
        lambda port: [sys.executable, "-c", HTTP_SERVER, str(port)], folder / "http.log", "127.0.0.1"
    ) as port:
        yield f"http://127.0.0.1:{port}/health"


Start = Callable[[Path], AbstractContextManager[str]]
SERVERS: dict[str, tuple[Start, Callable[[str], Probe]]] = {
    "redis": (redis_server, RedisProbe),
    "nats": (nats_server, NatsProbe),
    "http": (http_server, HttpProbe),
}


def pid_listening_on(url: str) -> int:
    port = url.partition("://")[2].rpartition(":")[2].partition("/")[0]
    listed = subprocess.run(["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    return int(listed.partition("pid=")[2].partition(",")[0])


def redis_cli(port: str, *words: str) -> None:
    subprocess.run(["redis-cli", "-p", port, *words], check=True, timeout=10)


async def ask(probe: Probe, timeout_s: float = 20) -> str:
    async with asyncio.timeout(timeout_s):
        return await probe.ask()


@pytest.mark.parametrize("kind", SERVERS)
async def test_probe_fails_while_server_is_stopped(kind: str, tmp_path: Path) -> None:
    start, make_probe = SERVERS[kind]
    with start(tmp_path) as url:
        probe = make_probe(url)
        assert [await ask(probe) for _ in range(3)] == [""] * 3
        pid = pid_listening_on(url)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WSTOPPED)  # all its threads
        try:
            with pytest.raises(TimeoutError):
                await ask(probe, timeout_s=0.3)
            asking = asyncio.create_task(ask(probe))  # over a new connection, which the kernel accepts
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await asking == "" == await ask(probe)
    assert await ask(probe) == "refuses connections"
    await probe.close()


@pytest.mark.parametrize("probe_type", [RedisProbe, NatsProbe, HttpProbe])
async def test_absent_server_fails(probe_type: type[RedisProbe | NatsProbe | HttpProbe]) -> None:
    probe = probe_type(f"tcp://127.0.0.1:{free_port()}")
    assert await ask(probe) == "refuses connections"
    await probe.close()


async def test_redis_password_is_required(tmp_path: Path) -> None:
    with redis_server(tmp_path) as url:
        port = url.rpartition(":")[2].partition("/")[0]
        redis_cli(port, "CONFIG", "SET", "requirepass", "a b@c")
        for user in ("", "default"):
            probe = RedisProbe(f"redis://{user}:a%20b%40c@127.0.0.1:{port}/0")
            assert await ask(probe) == ""
            await probe.close()


async def test_nats_with_credentials(tmp_path: Path) -> None:
    settings = tmp_path / "nats.conf"
    settings.write_text('authorization { users = [ { user: "up", password: "s e c" } ] }\n')
    command = [nats_program(), "-c", str(settings), "-a", "127.0.0.1", "-p"]
    with listening(lambda port: [*command, str(port)], tmp_path / "nats.log", "127.0.0.1") as port:
        probe = NatsProbe(f"nats://up:s%20e%20c@127.0.0.1:{port}")
        assert [await ask(probe) for _ in range(3)] == [""] * 3
        await probe.close()


async def test_grpc_probe_returns_services_fault() -> None:
    fault = ""

    async def what_is_wrong() -> str:
        return fault

    server = RpcServer("127.0.0.1", fault=what_is_wrong)
    await server.start()
    probe = GrpcProbe(open_channel(f"127.0.0.1:{server.port}"))
    assert await ask(probe) == ""
    fault = "the engine has made no step for 61 s"
    assert await ask(probe) == "cannot serve: the engine has made no step for 61 s"
    fault = ""
    assert await ask(probe) == ""
    await server.stop()
    assert await ask(probe) == "refuses connections"
    await probe.close()


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    """The exit message of the program: nothing, or a sentence for standard error, which is status 1."""
    monkeypatch.setattr("sys.argv", ["torchrelay-health", *arguments])
    try:
        health_check.main()
    except SystemExit as ended:
        return ended.code
    return None


async def test_health_check_says_whether_a_service_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stuck() -> str:
        return "the engine\u2019s step has taken 61 s"

    servers = RpcServer("127.0.0.1"), RpcServer("127.0.0.1", fault=stuck)
    silent, stuck_at = (f"127.0.0.1:{server.port}" for server in servers)
    for server in servers:
        await server.start()
    assert await asyncio.to_thread(call, monkeypatch, silent) is None
    assert capsys.readouterr().out == "serving\n"
    await servers[0].set_serving("", False)
    said = [await asyncio.to_thread(call, monkeypatch, address) for address in (silent, stuck_at)]
    assert said == [
        f"{silent} answers but is not serving: it does not say why",
        f"{stuck_at} answers but is not serving: the engine?s step has taken 61 s",
    ]
    for server in servers:
        await server.stop()


async def test_health_check_reports_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    server = RpcServer("127.0.0.1", tls=Tls(ours.node("store")))
    await server.start()
    address = f"127.0.0.1:{server.port}"
    files = "TORCHRELAY_TLS_CA_FILE, TORCHRELAY_TLS_CERT_FILE and TORCHRELAY_TLS_KEY_FILE"
    said = await asyncio.to_thread(call, monkeypatch, address)
    assert said == f"{address} expects TLS: set {files}"
    for authority, expected in (
        (theirs, f"{address} rejects this certificate: name the cluster's files with {files}"),
        (ours, None),
    ):
        for name, path in authority.node("operator").as_settings().items():
            monkeypatch.setenv(f"TORCHRELAY_{name.upper()}", path)
        assert await asyncio.to_thread(call, monkeypatch, address) == expected
    await server.stop()


def test_health_check_of_absent_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "127.0.0.1:1") == "127.0.0.1:1 does not answer"


def test_probe_of_other_protocol_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as rest:
        threading.Thread(target=rest.serve_forever, args=(0.02,)).start()
        address = f"127.0.0.1:{rest.server_address[1]}"
        assert call(monkeypatch, address) == f"{address} takes connections and gives no gRPC answer; is it a REST port?"
        rest.shutdown()


def test_health_check_prints_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--help") is None
    assert capsys.readouterr().out == health_check.USAGE + "\n"
    assert call(monkeypatch) == 2
    assert capsys.readouterr().err == health_check.USAGE + "\n"
