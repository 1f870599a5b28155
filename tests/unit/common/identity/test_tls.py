"""gRPC within TLS: only peers of the cluster reach each other; new connections use replaced certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.certificates import DAY, Authority
from tests.support.wait import HANG_S, eventually
from torchrelay.common.identity import tls as tls_module
from torchrelay.common.identity.callers import CLUSTER_NAME, Caller
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


STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def own_cluster(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "own")


@asynccontextmanager
async def server_with(files: TlsFiles, port: int = 0) -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1", port, tls=Tls(files, look_every_s=0))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


def serial_in(files: TlsFiles) -> int:
    return x509.load_pem_x509_certificate(files.cert.read_bytes()).serial_number


async def serial_at(server: RpcServer, client: TlsFiles) -> int:
    """The serial number of the certificate that a new connection sees."""
    context = Tls(client).identity.client_context
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname=CLUSTER_NAME)
    peer: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = peer.getpeercert(binary_form=True)
    writer.close()
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).serial_number


def stub_of(channel: grpc.aio.Channel) -> Any:
    return cast(Any, health_pb2_grpc.HealthStub(channel))


async def status_by(stub: Any) -> int:
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)).status)


async def test_server_uses_replaced_certificate_and_its_streams_go_on(own_cluster: Authority) -> None:
    files, client = own_cluster.node("server"), own_cluster.node("client")
    async with server_with(files) as server, open_channel(f"127.0.0.1:{server.port}", Tls(client)) as channel:
        states = stub_of(channel).Watch(health_pb2.HealthCheckRequest(service="any"))
        assert (await states.read()).status == STATUS.SERVICE_UNKNOWN
        before = serial_in(files)
        assert await serial_at(server, client) == before
        own_cluster.node("server")  # in the same files
        assert await serial_at(server, client) == serial_in(files) != before
        await server.set_serving("any", True)
        assert (await states.read()).status == STATUS.SERVING
        assert await status_by(stub_of(channel)) == STATUS.SERVING


async def test_server_trusts_replaced_ca(own_cluster: Authority, tmp_path: Path) -> None:
    """The file has both CAs while the certificates of the cluster's processes are replaced."""
    successor = Authority(tmp_path / "successor")
    files, client = own_cluster.node("server"), successor.node("client")
    trusting = TlsFiles(tmp_path / "both.crt", client.cert, client.key)
    trusting.ca.write_bytes(files.ca.read_bytes() + client.ca.read_bytes())
    async with server_with(files) as server, open_channel(f"127.0.0.1:{server.port}", Tls(trusting)) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await status_by(stub_of(channel))
        files.ca.write_bytes(trusting.ca.read_bytes())
        request = health_pb2.HealthCheckRequest()
        reply = await stub_of(channel).Check(request, wait_for_ready=True, timeout=HANG_S)
        assert reply.status == STATUS.SERVING


async def test_client_connects_again_with_replaced_files(own_cluster: Authority, tmp_path: Path) -> None:
    """The server comes back with a certificate of another CA, and trusts that alone."""
    successor = Authority(tmp_path / "successor")
    client = own_cluster.node("client")
    tls = Tls(client, look_every_s=0)
    async with server_with(own_cluster.node("server")) as server:
        channel = open_channel(f"127.0.0.1:{server.port}", tls)
        stub = stub_of(channel)
        states = stub.Watch(health_pb2.HealthCheckRequest(service="any"))
        assert (await states.read()).status == STATUS.SERVICE_UNKNOWN
        new = successor.node("client")
        for path, other in ((client.ca, new.ca), (client.cert, new.cert), (client.key, new.key)):
            path.write_bytes(other.read_bytes())
        assert await status_by(stub) == STATUS.SERVING, "on the connection that stands"
        await server.set_serving("any", True)
        assert (await states.read()).status == STATUS.SERVING
    await eventually(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
    async with server_with(successor.node("server"), server.port):
        assert await status_by(stub) == STATUS.SERVING
        assert await status_by(stub_of(channel)) == STATUS.SERVING
    await channel.close()
    with pytest.raises(grpc.aio.UsageError):
        await status_by(stub)


def test_unusable_contents_are_not_used(own_cluster: Authority) -> None:
    files = own_cluster.node("node", Caller.WORKER)
    key = files.key.read_bytes()
    tls, seldom = (Tls(files, Caller.WORKER, look_every_s=interval_s) for interval_s in (0, 3600))
    first, before = tls.identity, seldom.identity
    own_cluster.node("node", Caller.WORKER)
    assert seldom.identity is before, "the files are looked at at intervals"
    new_key = files.key.read_bytes()
    files.key.write_bytes(key)
    assert tls.identity is first, "the key is not of this certificate"
    files.key.write_bytes(new_key)
    second = tls.identity
    assert second is not first and second.key == new_key
    own_cluster.node("node", Caller.WORKER, end=-DAY)
    assert tls.identity is second, "it has expired"
    own_cluster.node("node", Caller.GATEWAY)
    assert tls.identity is second, "peers would take it for a gateway"
    files.cert.unlink()
    assert tls.identity is second
    own_cluster.node("node", Caller.WORKER)
    assert tls.identity is not second


def test_files_of_mounted_secret_are_replaced_together(own_cluster: Authority, tmp_path: Path) -> None:
    """The kubelet replaces a link to the folder of all files."""
    mount = tmp_path / "tls"
    mount.mkdir()
    for number in (1, 2):
        made = own_cluster.node("node")
        folder = mount / f"..{number}"
        folder.mkdir()
        for path in (made.ca, made.cert, made.key):
            (folder / path.name).write_bytes(path.read_bytes())
    (mount / "..data").symlink_to("..1")
    files = TlsFiles(*(mount / name for name in ("ca.crt", "node.crt", "node.key")))
    for path in (files.ca, files.cert, files.key):
        path.symlink_to(f"..data/{path.name}")
    tls = Tls(files, look_every_s=0)
    assert tls.identity.cert == (mount / "..1" / "node.crt").read_bytes()
    (mount / "..data_tmp").symlink_to("..2")
    (mount / "..data_tmp").rename(mount / "..data")
    assert tls.identity.cert == (mount / "..2" / "node.crt").read_bytes()


def test_file_that_vanishes_while_it_is_read_changes_nothing(
    own_cluster: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the thread that accepts connections of the data plane ended."""
    files = own_cluster.node("server")
    tls = Tls(files, look_every_s=0)
    before = tls.identity
    own_cluster.node("server")  # in the same files
    read = tls_module._read

    def read_and_remove(path: Path, setting: str) -> bytes:
        content = read(path, setting)
        if path == files.key:
            files.key.unlink()
        return content

    monkeypatch.setattr(tls_module, "_read", read_and_remove)
    assert tls.identity is before
