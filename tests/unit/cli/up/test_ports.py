"""What `torchrelay up` checks before it starts anything: ports, the machine, its disk, servers that variables name."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from tests.support.brokers import free_port, nats_server, running
from tests.support.small_disk import small_disk
from torchrelay.cli.errors import CliError
from torchrelay.cli.up import machine_check
from torchrelay.cli.up.broker_programs import redis_program
from torchrelay.cli.up.disk import (
    FULL_BYTES,
    LOW_BYTES,
    DiskState,
    check_disk,
    disk_message,
    disk_state,
    folder_bytes,
    log_limit_bytes,
)
from torchrelay.cli.up.external_servers import check_external_servers, external_servers
from torchrelay.cli.up.machine_check import check_gpus, check_machine
from torchrelay.cli.up.plan import UpOptions
from torchrelay.cli.up.ports import Ports
from torchrelay.cli.up.stream_sizes import stream_sizes
from torchrelay.common.host.addresses import REACHED_AT, listening_socket
from torchrelay.common.host.machine import Machine
from torchrelay.common.net.nats_client import MIN_STREAM_BYTES, StreamSizes
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
    redis = [redis_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
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


def test_own_engine_refuses_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRELAY_ENGINE", raising=False)
    options = UpOptions(num_devices=2)
    with pytest.raises(CliError) as caught:
        check_machine(options, tmp_path / "arena", Machine.here())
    assert str(caught.value) == "the engine torchrelay computes a model on one device, and --devices is 2"
    monkeypatch.setenv("TORCHRELAY_ENGINE", "vllm")
    check_machine(options, tmp_path / "arena", Machine.here())


@pytest.mark.parametrize(
    ("device", "num_workers", "num_devices", "problem"),
    [
        ("cuda", 1, 2, ""),
        ("auto", 2, 1, ""),
        ("cpu", 9, 1, ""),
        ("cuda:1", 1, 2, "cuda:1 to cuda:2 is asked for and this machine has 2"),
        ("auto", 3, 1, "3 workers need the GPUs 0 to 2, and this machine has 2"),
        ("cuda:1", 2, 1, "2 workers need the GPUs 1 to 2, and this machine has 2"),
        ("cuda", 2, 2, "2 workers need the GPUs 0 to 3, and this machine has 2"),
    ],
)
def test_each_slot_needs_its_gpus(
    device: str, num_workers: int, num_devices: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRELAY_ENGINE", "vllm")
    options = UpOptions(
        device=device,
        num_prefill_workers=0,
        num_decode_workers=0,
        num_both_workers=num_workers,
        num_devices=num_devices,
        gpus=("0", "1"),
    )
    with pytest.raises(CliError) if problem else nullcontext() as caught:
        check_machine(options, tmp_path / "arena", Machine.here())
    assert caught is None or str(caught.value) == problem


def test_wsl_has_the_gpus_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be counted."""
    monkeypatch.setattr(machine_check, "WSL_NODE", tmp_path)
    check_gpus("cuda:1", ("0",), 1)
    check_gpus("auto", ("0",), 1)
    with pytest.raises(CliError, match="2 workers need the GPUs 0 to 1, and this machine has 1"):
        check_gpus("auto", ("0",), 2)


MIB = 1 << 20


def test_disk_state_has_hysteresis() -> None:
    assert disk_state(FULL_BYTES - 1) is DiskState.FULL
    assert disk_state(FULL_BYTES, DiskState.FULL) is DiskState.FULL
    assert disk_state(2 * FULL_BYTES, DiskState.FULL) is DiskState.LOW
    assert disk_state(LOW_BYTES, DiskState.LOW) is DiskState.LOW
    assert disk_state(2 * LOW_BYTES, DiskState.LOW) is DiskState.ROOMY
    assert disk_state(LOW_BYTES) is DiskState.ROOMY


def test_logs_fit_on_small_disk_and_messages_name_the_folder() -> None:
    num_files = 7 * 2 + 2  # seven children's logs, their copies, and traces of twice the length
    assert num_files * log_limit_bytes(100 * MIB) <= 50 * MIB
    assert log_limit_bytes(1 << 40) == 32 * MIB
    for state in DiskState:
        assert "/srv/home has 1.05 MB free" in disk_message(state, Path("/srv/home"), MIB)


def test_folder_bytes_counts_all_files(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(bytes(10))
    (tmp_path / "file").write_bytes(bytes(5))
    assert folder_bytes(tmp_path) == 15
    assert folder_bytes(tmp_path / "absent") == 0


@pytest.mark.lab
def test_start_on_full_disk_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", 64 * MIB) as disk:
        check_disk(disk.folder)
        disk.fill(num_free=16 * MIB)
        with pytest.raises(CliError, match=f"the disk of {disk.folder} has 16.8 MB free; a start takes 33.6 MB"):
            check_disk(disk.folder)


def test_streams_take_at_most_eighth_of_disk() -> None:
    for num_free_mib in (0, 1, 100, 1000, 100_000):
        sizes = stream_sizes(num_free_mib * MIB)
        least = StreamSizes(MIN_STREAM_BYTES, MIN_STREAM_BYTES)
        assert sizes == least or sizes.history_bytes + sizes.usage_bytes <= max(num_free_mib * MIB // 8, 2 * MIB)
    assert stream_sizes(1 << 40) == StreamSizes()
    assert stream_sizes(100 * MIB) == StreamSizes(history_bytes=5 * MIB // 2, usage_bytes=10 * MIB)


NATS, REDIS, DATABASE = (f"TORCHRELAY_{name}_URL" for name in ("NATS", "REDIS", "DATABASE"))


def test_invalid_address_is_named() -> None:
    for variable, url in (
        (NATS, "localhost:4222"),
        (NATS, "nats:///"),
        (NATS, "nats://host:many"),
        (REDIS, "http://host"),
        (DATABASE, "foo"),
        (DATABASE, "mysql://host/name"),
    ):
        with pytest.raises(CliError) as caught:
            external_servers({variable: url})
        assert variable in caught.value.message and url in caught.value.message
        assert caught.value.hint


def test_password_is_not_shown() -> None:
    for variable, url, told in (
        (NATS, "http://ann:hunter2@host", "'http://ann:***@host'"),
        (NATS, "nats://:hunter2@host:many", "'nats://:***@host:many'"),
        (REDIS, "redis//:hunter2@host", "***@host"),
        (REDIS, "http://host/0?password=hunter2&db=1", "'http://host/0?password=***&db=1'"),
        (DATABASE, "mysql://ann:hunt@er2@host/name", "'mysql://ann:***@host/name'"),
    ):
        with pytest.raises(CliError) as caught:
            external_servers({variable: url})
        assert told in caught.value.message
        assert "er2" not in caught.value.message + str(caught.value.__cause__)


def test_certificates_are_found_by_home() -> None:
    named = {
        NATS: "nats://a:b@one, nats://three:5",
        REDIS: "unix:///tmp/redis.sock",
        DATABASE: "postgresql+asyncpg://u:p@two:1/name",
    }
    assert {server.name: server.addresses for server in external_servers(named)} == {
        "Redis": (),
        "NATS": (("one", 4222), ("three", 5)),
        "PostgreSQL": (("two", 1),),
    }
    assert external_servers({DATABASE: "sqlite:///ledger.db", NATS: ""}) == []


async def test_unreachable_external_server_refuses_start() -> None:
    there = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with there:
        port = there.sockets[0].getsockname()[1]
        await check_external_servers({NATS: f"nats://127.0.0.1:{port}"})
        await check_external_servers({NATS: f"nats://127.0.0.1:{free_port()},nats://127.0.0.1:{port}"})  # one of them
    silent = free_port()
    for variable, url in ((NATS, f"nats://127.0.0.1:{silent}"), (REDIS, f"redis://127.0.0.1:{silent}/0")):
        with pytest.raises(CliError, match=f"127.0.0.1:{silent}, which {variable} names"):
            await check_external_servers({variable: url})
