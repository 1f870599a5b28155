"""The process as a whole: settings, reports on NATS, a real start and a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.unit.param_store.stores import CLUSTER_KEY, running_store
from torchrelay.common.events import Subjects, connect
from torchrelay.common.ids import new_id
from torchrelay.common.settings import load_settings
from torchrelay.control.v1 import reports_pb2
from torchrelay.param_store.background import publish_reports
from torchrelay.param_store.settings import StoreSettings
from torchrelay.transfer.tickets import derive_node_key


async def test_reports_are_published_on_nats(tmp_path: Path, nats_url: str) -> None:
    prefix = new_id("t")
    client = await connect(nats_url, "test")
    try:
        heard = await client.subscribe(Subjects(prefix).store_load())
        settings = {"nats_url": nats_url, "nats_prefix": prefix, "host_id": "host-1", "store_id": "sto-1"}
        async with running_store(tmp_path, (publish_reports,), **settings) as store:
            first = reports_pb2.StoreReport.FromString((await heard.next_msg(10)).data)
            second = reports_pb2.StoreReport.FromString((await heard.next_msg(10)).data)
            assert first.store_id == second.store_id == "sto-1"
            assert first.host_id == "host-1"
            assert first.incarnation == second.incarnation != ""
            assert first.data_address == store.data_address
            assert 0 < second.arena_bytes <= second.arena_target_bytes == 32 << 20
    finally:
        await client.close()


async def test_a_store_starts_and_works_while_nats_is_away(tmp_path: Path) -> None:
    async with running_store(tmp_path, (publish_reports,), nats_url="nats://127.0.0.1:1") as store:
        assert (await store.report()).store_id == store.store_id


def test_settings_need_a_node_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(StoreSettings, "torchrelay-param-store", ["--node-key", "abc"])
    assert "node_key (TORCHRELAY_NODE_KEY)" in capsys.readouterr().err


def test_the_arena_takes_what_the_machine_can_spare(tmp_path: Path) -> None:
    key = "0" * 64
    spare = StoreSettings(node_key=key, store_id="sto-1").arena_capacity_bytes()
    assert 0 < spare <= 4 << 30
    assert StoreSettings(node_key=key, arena_bytes=5 << 20).arena_capacity_bytes() == 5 << 20
    assert StoreSettings(node_key=key, store_id="sto-1").arena_file == Path("/dev/shm/torchrelay-sto-1")


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


async def test_the_process_says_where_it_serves_and_leaves_nothing_behind(tmp_path: Path, nats_url: str) -> None:
    store_id = new_id("sto")
    ready = tmp_path / "ready.json"
    settings = {
        "STORE_ID": store_id,
        "NODE_KEY": derive_node_key(CLUSTER_KEY, store_id).hex(),
        "DATA_DIR": str(tmp_path / "data"),
        "REMOTE_URL": f"file://{tmp_path / 'remote'}",
        "ARENA_BYTES": str(16 << 20),
        "READY_FILE": str(ready),
        "NATS_URL": nats_url,
        "NATS_PREFIX": new_id("t"),
    }
    environment = {**os.environ, **{f"TORCHRELAY_{name}": value for name, value in settings.items()}}
    command = (sys.executable, "-c", "from torchrelay.param_store.main import main; main()")
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(20):
            async for line in process.stderr:
                if json.loads(line)["event"] == "serving":
                    break
        assert set(json.loads(ready.read_text())) == {"grpc", "data", "pid"}
        assert f"torchrelay-{store_id}" in shared_memory()
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0, errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not ready.exists()
    assert f"torchrelay-{store_id}" not in shared_memory()
