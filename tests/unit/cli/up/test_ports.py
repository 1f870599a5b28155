"""Reserved ports: nobody else gets them, their servers do."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.brokers import broker_program, nats_server, running
from torchrelay.cli.errors import CliError
from torchrelay.cli.up.ports import Ports
from torchrelay.common.net.rpc.server import RpcServer

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


def test_foreign_address_is_refused(ports: Ports) -> None:
    with pytest.raises(CliError, match="cannot listen on"):
        ports.free("192.0.2.1")
