"""What `torchrelay up` checks before it starts anything: the machine, its disk, servers that variables name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.brokers import free_port
from tests.support.small_disk import small_disk
from torchrelay.cli.errors import CliError
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
from torchrelay.cli.up.machine_check import check_machine
from torchrelay.cli.up.plan import UpOptions
from torchrelay.cli.up.stream_sizes import stream_sizes
from torchrelay.common.host.machine import Machine
from torchrelay.common.net.nats_client import MIN_STREAM_BYTES, StreamSizes


def test_own_engine_refuses_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRELAY_ENGINE", raising=False)
    options = UpOptions(num_devices=2)
    with pytest.raises(CliError) as caught:
        check_machine(options, tmp_path / "arena", Machine.here())
    assert str(caught.value) == "the engine torchrelay computes a model on one device, and --devices is 2"
    monkeypatch.setenv("TORCHRELAY_ENGINE", "vllm")
    check_machine(options, tmp_path / "arena", Machine.here())


def test_a_slot_needs_all_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_ENGINE", "vllm")
    gpus = tmp_path / "gpus"
    for number in range(2):
        (gpus / str(number)).mkdir(parents=True)
    check_machine(UpOptions(device="cuda", num_devices=2), tmp_path / "arena", Machine.here(), gpus)
    with pytest.raises(CliError) as caught:
        check_machine(UpOptions(device="cuda:1", num_devices=2), tmp_path / "arena", Machine.here(), gpus)
    assert str(caught.value) == "cuda:1 to cuda:2 is asked for and this machine has 2"


MIB = 1 << 20


def test_disk_state_has_hysteresis() -> None:
    assert disk_state(FULL_BYTES - 1) is DiskState.FULL
    assert disk_state(FULL_BYTES, DiskState.FULL) is DiskState.FULL
    assert disk_state(2 * FULL_BYTES, DiskState.FULL) is DiskState.LOW
    assert disk_state(LOW_BYTES, DiskState.LOW) is DiskState.LOW
    assert disk_state(2 * LOW_BYTES, DiskState.LOW) is DiskState.ROOMY
    assert disk_state(LOW_BYTES) is DiskState.ROOMY


def test_logs_fit_on_small_disk() -> None:
    num_files = 7 * 2 + 2  # seven children's logs, their copies, and traces of twice the length
    assert num_files * log_limit_bytes(100 * MIB) <= 50 * MIB
    assert log_limit_bytes(1 << 40) == 32 * MIB


def test_messages_name_folder() -> None:
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


MIB = 1 << 20


@pytest.mark.parametrize("num_free_mib", [0, 1, 100, 1000, 100_000])
def test_streams_take_at_most_eighth_of_disk(num_free_mib: int) -> None:
    sizes = stream_sizes(num_free_mib * MIB)
    least = StreamSizes(MIN_STREAM_BYTES, MIN_STREAM_BYTES)
    assert sizes == least or sizes.history_bytes + sizes.usage_bytes <= max(num_free_mib * MIB // 8, 2 * MIB)


def test_large_disk_gives_streams_full_size() -> None:
    assert stream_sizes(1 << 40) == StreamSizes()
    assert stream_sizes(100 * MIB) == StreamSizes(history_bytes=5 * MIB // 2, usage_bytes=10 * MIB)


NATS, REDIS, DATABASE = (f"TORCHRELAY_{name}_URL" for name in ("NATS", "REDIS", "DATABASE"))


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        (NATS, "localhost:4222"),
        (NATS, "nats:///"),
        (NATS, "nats://host:many"),
        (REDIS, "http://host"),
        (DATABASE, "foo"),
        (DATABASE, "mysql://host/name"),
    ],
)
def test_invalid_address_is_named(variable: str, url: str) -> None:
    with pytest.raises(CliError) as caught:
        external_servers({variable: url})
    assert variable in caught.value.message and url in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("variable", "url", "told"),
    [
        (NATS, "http://ann:hunter2@host", "'http://ann:***@host'"),
        (NATS, "nats://:hunter2@host:many", "'nats://:***@host:many'"),
        (REDIS, "redis//:hunter2@host", "***@host"),
        (REDIS, "http://host/0?password=hunter2&db=1", "'http://host/0?password=***&db=1'"),
        (DATABASE, "mysql://ann:hunt@er2@host/name", "'mysql://ann:***@host/name'"),
    ],
)
def test_password_is_not_shown(variable: str, url: str, told: str) -> None:
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
