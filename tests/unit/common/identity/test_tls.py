"""gRPC within TLS: peers of one cluster reach each other at any address, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.certificates import DAY, Authority
from torchrelay.common.identity.callers import Caller
from torchrelay.common.identity.tls import Tls, TlsFiles, TlsUnusable
from torchrelay.common.net.probes import GrpcProbe
from torchrelay.common.net.rpc.channels import open_blocking_channel, open_channel
from torchrelay.common.net.rpc.server import RpcServer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def outsider(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("outsider"))


@pytest.fixture
async def address(cluster: Authority) -> AsyncIterator[str]:
    """A server of the cluster."""
    server = RpcServer("127.0.0.1", tls=Tls(cluster.node("server")))
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


async def status_at(address: str, tls: Tls | None) -> int:
    async with open_channel(address, tls) as channel:
        stub = cast(Any, health_pb2_grpc.HealthStub(channel))
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status)


async def assert_refused(address: str, tls: Tls | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status_at(address, tls)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_peers_of_same_cluster_connect_at_any_address(address: str, cluster: Authority) -> None:
    assert await status_at(address, Tls(cluster.node("client"))) == health_pb2.HealthCheckResponse.SERVING


async def test_unknown_method_is_refused(address: str, cluster: Authority, outsider: Authority) -> None:
    mine, theirs = cluster.node("mine"), outsider.node("theirs")
    knows_our_ca = Tls(TlsFiles(mine.ca, theirs.cert, theirs.key))
    for client in (None, Tls(theirs), knows_our_ca, Tls(cluster.expired())):
        await assert_refused(address, client)


async def test_client_refuses_server_of_other_cluster(cluster: Authority, outsider: Authority) -> None:
    mine, theirs = cluster.node("mine"), outsider.node("theirs")
    elsewhere = cluster.node("elsewhere", dns=("www.example.com",))
    knows_our_ca = TlsFiles(mine.ca, theirs.cert, theirs.key)
    for files in (None, theirs, knows_our_ca, elsewhere, cluster.expired()):
        server = RpcServer("127.0.0.1", tls=None if files is None else Tls(files))
        await server.start()
        await assert_refused(f"127.0.0.1:{server.port}", Tls(mine))
        await server.stop(0)


@pytest.mark.parametrize("callee", [Caller.SCHEDULER, Caller.STORE, Caller.WORKER])
async def test_client_refuses_server_of_other_role(cluster: Authority, callee: Caller) -> None:
    """A compromised worker may listen at the scheduler's address with a certificate of the same cluster."""
    client = Tls(cluster.node("client", Caller.GATEWAY))
    for part in Caller:
        server = RpcServer("127.0.0.1", tls=Tls(cluster.node("server", part)))
        await server.start()
        address = f"127.0.0.1:{server.port}"
        async with open_channel(address, client, callee=callee) as channel:
            fault = await GrpcProbe(channel).ask()
        assert fault == ("" if part is callee else "refuses connections"), part
        with open_blocking_channel(address, client, callee=callee) as blocking:
            connected = grpc.channel_ready_future(blocking)
            if part is callee:
                await asyncio.to_thread(connected.result, 60)
            else:
                with pytest.raises(grpc.FutureTimeoutError):
                    await asyncio.to_thread(connected.result, 0.1)
        await server.stop(0)


def test_certificate_refused_by_peers_fails_check(cluster: Authority, outsider: Authority) -> None:
    Tls(cluster.node("good")).check()
    mine, theirs = cluster.node("mine"), outsider.node("theirs")
    bad = {
        "certificate has expired": cluster.expired(),
        "not yet valid": cluster.node("early", begin=DAY / 2),
        "name torchrelay.internal": cluster.node("elsewhere", dns=("www.example.com",)),
        "unable to get local issuer": TlsFiles(mine.ca, theirs.cert, theirs.key),
    }
    for reason, files in bad.items():
        with pytest.raises(TlsUnusable, match=reason):
            Tls(files).check()


def test_invalid_tls_file_error_names_setting(cluster: Authority, tmp_path: Path) -> None:
    good, other = cluster.node("good"), cluster.node("other")
    text, absent = tmp_path / "text", tmp_path / "absent"
    text.write_text("no certificate\n")
    bad = {
        "TORCHRELAY_TLS_CA_FILE: .*/absent cannot be read: No such file": TlsFiles(absent, good.cert, good.key),
        "TORCHRELAY_TLS_CA_FILE: .*/text contains no PEM certificate": TlsFiles(text, good.cert, good.key),
        "TORCHRELAY_TLS_CERT_FILE and TORCHRELAY_TLS_KEY_FILE: .* are not a certificate and its unencrypted key": (
            TlsFiles(good.ca, good.cert, other.key)
        ),
        "TORCHRELAY_TLS_KEY_FILE: .*/absent cannot be read": TlsFiles(good.ca, good.cert, absent),
    }
    for message, files in bad.items():
        with pytest.raises(TlsUnusable, match=message):
            Tls(files)
