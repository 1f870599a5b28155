"""The process as a whole: settings, reports on NATS, a real start and a clean end."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import termios
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.callers import every_token
from tests.support.small_disk import small_disk
from tests.support.wait import HANG_S, eventually
from tests.unit.param_store.model_folders import StoredPack, write_folder
from tests.unit.param_store.running_store import CLUSTER_KEY, REMOTE, declared, is_complete, running_store
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.machine import Machine
from torchrelay.common.ids import new_id
from torchrelay.common.net.nats_client import Subjects, connect
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.process.settings import load_settings
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import reports_pb2
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.param_store.background_tasks import publish_reports
from torchrelay.param_store.settings import StoreSettings
from torchrelay.param_store.store import Store
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.protocol.tickets import derive_node_key


async def test_reports_published_on_nats(tmp_path: Path, nats_url: str) -> None:
    prefix = new_id("t")
    client = await connect(nats_url, "test")
    try:
        reports = await client.subscribe(Subjects(prefix).store_load())
        settings = {"nats_url": nats_url, "nats_prefix": prefix, "host_id": "host-1", "store_id": "sto-1"}
        async with running_store(tmp_path, (publish_reports,), **settings) as store:
            first = reports_pb2.StoreReport.FromString((await reports.next_msg(10)).data)
            second = reports_pb2.StoreReport.FromString((await reports.next_msg(10)).data)
            assert first.store_id == second.store_id == "sto-1"
            assert first.host_id == "host-1"
            assert first.incarnation == second.incarnation != ""
            assert first.data_address == store.data_address
            assert 0 < second.arena_bytes <= second.arena_target_bytes == 32 << 20
    finally:
        await client.close()


async def test_store_serves_without_nats(tmp_path: Path) -> None:
    async with running_store(tmp_path, (publish_reports,), nats_url="nats://127.0.0.1:1") as store:
        assert (await store.report()).store_id == store.store_id


def test_settings_require_store_id_and_node_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(StoreSettings, "torchrelay-param-store", ["--node-key", "abc"])
    said = capsys.readouterr().err
    assert "node_key (TORCHRELAY_NODE_KEY)" in said and "store_id (TORCHRELAY_STORE_ID)" in said


def test_default_arena_fits_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StoreSettings(node_key="0" * 64, store_id="sto-1")
    assert 0 < settings.arena_capacity_bytes() <= 4 << 30
    assert settings.model_copy(update={"arena_bytes": 5 << 20}).arena_capacity_bytes() == 5 << 20
    machine = Machine(num_cores=2, memory_bytes=100 << 30, shared_memory_bytes=90 << 30)
    monkeypatch.setattr(Machine, "here", lambda _: machine)
    assert settings.arena_capacity_bytes() == 4 << 30
    assert settings.model_copy(update={"arena_limit_bytes": 0}).arena_capacity_bytes() == 50 << 30
    assert settings.arena_file == Path("/dev/shm/torchrelay-sto-1")


def test_arena_size_kept_after_crash(tmp_path: Path) -> None:
    settings = StoreSettings(node_key="0" * 64, store_id="sto-1", arena_path=tmp_path / "arena")
    Arena.create(settings.arena_file, 5 << 20).close()
    assert settings.arena_capacity_bytes() == 5 << 20
    settings.arena_file.write_bytes(b"something else")
    assert settings.arena_capacity_bytes() > 5 << 20


@pytest.mark.lab
def test_arena_must_fit_file_system_of_its_folder(tmp_path: Path) -> None:
    """In a container that is a volume, while /dev/shm is the container's own and small."""
    with small_disk(tmp_path / "arena", 64 << 20) as disk:
        settings = StoreSettings(
            store_id="store-1", node_key="0" * 64, arena_path=disk.folder / "parameters", arena_bytes=128 << 20
        )
        with pytest.raises(InvalidRequest, match=f"62.9 MB of {disk.folder} are free"):
            settings.arena_capacity_bytes()
        assert settings.model_copy(update={"arena_bytes": 32 << 20}).arena_capacity_bytes() == 32 << 20


async def test_activity_changes_with_growing_arena(tmp_path: Path) -> None:
    places: dict[str, Any] = {"data_dir": tmp_path / "data", "arena_path": tmp_path / "arena", "arena_bytes": 32 << 20}
    remote_url = f"file://{tmp_path / 'remote'}"
    settings = StoreSettings(store_id=new_id("sto"), node_key="ab" * 32, remote_url=remote_url, **places)
    store = Store(settings, asyncio.get_running_loop())
    try:
        before = store.activity()
        assert store.activity() == before
        store.arena.grow(1 << 20)
        assert store.activity() != before
    finally:
        store.close()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@asynccontextmanager
async def store_process(folder: Path, store_id: str, nats_url: str, *flags: str) -> AsyncIterator[Process]:
    """A store as its own process; entered once it serves, killed at the end if it still runs."""
    settings = {
        "STORE_ID": store_id,
        "NODE_KEY": derive_node_key(CLUSTER_KEY, store_id).hex(),
        "DATA_DIR": str(folder / "data"),
        "REMOTE_URL": f"file://{folder / 'remote'}",
        "ARENA_BYTES": str(32 << 20),
        "READY_FILE": str(folder / "ready.json"),
        "NATS_URL": nats_url,
        "NATS_PREFIX": store_id,
    }
    environment = {**os.environ, **{f"TORCHRELAY_{name}": value for name, value in settings.items()}}
    command = (sys.executable, "-c", "from torchrelay.param_store.main import main; main()", *flags)
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(HANG_S):
            async for line in process.stderr:
                if json.loads(line)["event"] == "serving":
                    break
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
            os.unlink(f"/dev/shm/torchrelay-{store_id}")


async def fetch_in_process(folder: Path, store_id: str, pack: StoredPack) -> None:
    """Relays the pack from the remote store to the store's process."""
    address = json.loads((folder / "ready.json").read_text())["grpc"]
    async with open_channel(address, token=every_token(CLUSTER_KEY, store_id)) as channel:
        stub = ParamStoreStub(channel)
        await stub.Relay(pb.RelayRequest(pack_id=pack.pack_id, sources=[REMOTE]))
        async for report in stub.WatchCopies(pb.WatchCopiesRequest()):
            if is_complete(report.copies[0], pack.pack_id):
                break


async def test_process_publishes_addresses_and_cleans_up(tmp_path: Path, nats_url: str) -> None:
    store_id, ready = new_id("sto"), tmp_path / "ready.json"
    async with store_process(tmp_path, store_id, nats_url) as process:
        assert set(json.loads(ready.read_text())) == {"grpc", "data", "pid"}
        assert f"torchrelay-{store_id}" in shared_memory()
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), HANG_S)
        assert process.returncode == 0, errors
    assert not ready.exists()
    assert f"torchrelay-{store_id}" not in shared_memory()


def num_unread(descriptor: int) -> int:
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


async def test_store_with_hung_disk_stops(tmp_path: Path, nats_url: str) -> None:
    store_id, folder = new_id("sto"), write_folder(tmp_path / "model")
    async with store_process(tmp_path, store_id, nats_url, "--stop-limit-s", "1") as process:
        address = json.loads((tmp_path / "ready.json").read_text())["grpc"]
        async with open_channel(address, token=every_token(CLUSTER_KEY, store_id)) as channel:
            stub = ParamStoreStub(channel)
            await stub.BeginUpload(pb.BeginUploadRequest(upload_id="u1", tenant_id="ten-1", files=declared(folder)))
            pipe = tmp_path / "data/uploads/u1/files/model.safetensors"
            os.mkfifo(pipe)  # a file whose writer waits for ever once 64 KiB are unread
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            opening = pb.PutFileRequest.Open(upload_id="u1", path=pipe.name)
            call = stub.PutFile()
            await call.write(pb.PutFileRequest(open=opening))
            await call.write(pb.PutFileRequest(data=bytes(100_000)))
            await eventually(lambda: num_unread(reader) >= 1 << 16, "64 KiB in the pipe")
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), HANG_S)
    os.close(reader)
    assert process.returncode == -signal.SIGALRM
    os.unlink(f"/dev/shm/torchrelay-{store_id}")  # as after a crash, its arena is left for its next start


async def test_killed_store_restarts_with_packs(tmp_path: Path, nats_url: str, pack: StoredPack) -> None:
    store_id = new_id("sto")
    async with store_process(tmp_path, store_id, nats_url) as process:
        await fetch_in_process(tmp_path, store_id, pack)
        process.kill()
        await process.communicate()
    async with running_store(tmp_path, store_id=store_id, arena_path=None) as store:  # where the killed process had it
        await store.until_complete(pack.pack_id)
        assert await store.relay(pack.pack_id, REMOTE) is True
        assert await store.bytes_in(pack.pack_id) == pack.data
        assert (await store.report()).bytes_received == 0
    assert f"torchrelay-{store_id}" not in shared_memory()
