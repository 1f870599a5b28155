"""A store whose disk or arena hangs says so."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from tests.unit.param_store.running_store import running_store
from torchrelay.common.health import Health
from torchrelay.common.net.probes import GrpcProbe
from torchrelay.common.net.rpc import open_channel
from torchrelay.param_store.storage_checks import on_own_thread, touch


async def test_a_store_in_good_health(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store, open_channel((await store.report()).grpc_address) as channel:
        assert await GrpcProbe(channel).ask() == ""


async def test_a_disk_that_does_not_answer_is_named_until_it_does(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # To open a pipe takes until somebody opens its other end, as a file takes on a disk that is gone.
    health = Health({"disk": on_own_thread("disk", lambda: pipe.read_bytes())}, {}, silent_s=0.2, ask_every_s=0)
    assert await health.fault() == "the disk does not answer"
    pipe.write_bytes(b"")
    async with asyncio.timeout(20):
        while await health.fault():
            pass
    await health.close()


async def test_a_thread_that_holds_the_arenas_lock_for_ever_is_seen() -> None:
    lock = threading.Lock()

    def ask_under_lock() -> None:
        with lock:
            pass

    health = Health({"arena": on_own_thread("arena", ask_under_lock)}, {}, silent_s=0.2, ask_every_s=0)
    assert await health.fault() == ""
    with lock:
        assert await health.fault() == "the arena does not answer"
    async with asyncio.timeout(20):
        while await health.fault():
            pass
    await health.close()


@pytest.mark.parametrize("folder", ["present", "absent"])
def test_touching_leaves_nothing(tmp_path: Path, folder: str) -> None:
    (tmp_path / "present").mkdir()
    touch(tmp_path / folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["present"]
