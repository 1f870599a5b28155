"""Reserved ports: nobody else gets them, their servers do."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.brokers import broker_program, nats_server, running
from torchrelay.cli.errors import CliError
from torchrelay.cli.up.ports import Ports
from torchrelay.common.host.addresses import REACHED_AT, listening_socket
from torchrelay.common.net.rpc.server import RpcServer


def _first_free_port() -> int:
    """The first port on which a user without rights may listen."""
    path = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    return int(path.read_text()) if path.exists() else 1024


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")


@pytest.fixture
def ports() -> Iterator[Ports]:
    with closing(Ports()) as ports:
        yield ports


@linux_only
def test_reserved_port_refuses_binds_and_connections(ports: Ports) -> None:
    port = ports.free()
    with socket.socket() as outsider, pytest.raises(OSError, match="in use"):
        outsider.bind(("127.0.0.1", port))
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", port))
    ports.close()
    with socket.socket() as next_owner:
        next_owner.bind(("127.0.0.1", port))


@linux_only
def test_reserved_port_is_refused_to_other_up(ports: Ports) -> None:
    port = ports.free()
    with closing(Ports()) as others:
        assert others.free(preferred=[port]) != port
        with pytest.raises(CliError, match=f"port {port} on 127.0.0.1 is taken"):
            others.exactly("127.0.0.1", port)
        ports.close()
        assert others.free(preferred=[port]) == port


async def test_our_servers_listen_on_reserved_ports_again_and_again(ports: Ports) -> None:
    port = ports.free()
    for _ in range(2):
        server = RpcServer("127.0.0.1", port)
        await server.start()
        with socket.create_connection(("127.0.0.1", port), timeout=5) as caller:
            assert server.port == port == caller.getpeername()[1]
        await server.stop()
    for _ in range(2):
        with (
            socket.create_server(("127.0.0.1", port)) as listening,
            socket.create_connection(("127.0.0.1", port), timeout=5) as caller,
        ):
            accepted, peer = listening.accept()
            accepted.close()
            assert peer == caller.getsockname()


def test_brokers_listen_on_reserved_ports_again_and_again(ports: Ports, tmp_path: Path) -> None:
    port = ports.free()
    redis = [broker_program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with nats_server(tmp_path / name, port) as url:
            assert url.endswith(f":{port}")
        with running(redis, tmp_path / name / "redis.log", port):
            pass


def test_taken_port_is_refused(ports: Ports) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert ports.free(preferred=[port]) != port
        with pytest.raises(CliError, match=f"port {port} on 127.0.0.1 is taken") as taken:
            ports.exactly("127.0.0.1", port, "--http-port")
        assert taken.value.hint == "choose another in --http-port, or 0 for any free one"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no host", "a" * 64, "::1::"])
def test_foreign_address_is_refused(ports: Ports, host: str) -> None:
    for choose in (ports.free, lambda host: ports.exactly(host, 39_999)):
        with pytest.raises(CliError, match=f"this machine cannot listen on {host}") as refused:
            choose(host)
        assert refused.value.hint == "pass one of its own addresses with --host"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
async def test_servers_listen_on_reserved_ports_of_both_families(ports: Ports, host: str) -> None:
    port = ports.free(host)
    with closing(Ports()) as others, pytest.raises(CliError, match=f"port {port} on {host} is taken"):
        others.exactly(host, port)
    server = RpcServer(host, port)
    await server.start()
    with socket.create_connection((REACHED_AT.get(host, host), port), timeout=5):
        pass
    await server.stop()
    with listening_socket(host, port), socket.create_connection((REACHED_AT.get(host, host), port), timeout=5):
        pass


def test_port_that_one_family_has_is_taken_for_both(ports: Ports) -> None:
    with listening_socket("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(CliError, match=f"port {port} on :: is taken"):
            ports.exactly("::", port)
        assert ports.exactly("::1", port) == port


@pytest.mark.skipif(os.geteuid() != 0 or _first_free_port() <= 80, reason="all users may listen on port 80 here")
def test_privileged_port_is_refused_with_the_reason(ports: Ports) -> None:
    os.seteuid(65_534)
    try:
        with pytest.raises(CliError, match="this user may not listen on port 80") as refused:
            ports.exactly("127.0.0.1", 80, "--http-port")
    finally:
        os.seteuid(0)
    assert refused.value.hint == "choose a port above 1023"
