"""Output and status of the health check."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.support.certificates import Authority
from torchrelay.common.identity.tls import Tls
from torchrelay.common.net import health_check
from torchrelay.common.net.rpc.server import RpcServer

Serving = health_pb2.HealthCheckResponse


@pytest.fixture
def servicer() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture
def address(servicer: health.HealthServicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    """The exit message of the program: nothing, or a sentence for standard error, which is status 1."""
    monkeypatch.setattr("sys.argv", ["torchrelay-health", *arguments])
    try:
        health_check.main()
    except SystemExit as ended:
        return ended.code
    return None


def test_health_check_of_serving_service_passes(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, address) is None
    assert capsys.readouterr().out == "serving\n"


def test_health_check_of_stopped_service_fails(
    address: str, servicer: health.HealthServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer.set("", Serving.NOT_SERVING)
    assert call(monkeypatch, address) == f"{address} answers but is not serving: it does not say why"


async def test_health_check_prints_services_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck() -> str:
        return "the engine\u2019s step has taken 61 s"

    server = RpcServer("127.0.0.1", fault=stuck)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    said = await asyncio.to_thread(call, monkeypatch, address)
    assert said == f"{address} answers but is not serving: the engine?s step has taken 61 s"
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


def test_absent_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
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
