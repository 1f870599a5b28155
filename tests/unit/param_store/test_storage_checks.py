"""A store whose disk or arena hangs says so; notices cross from threads to coroutines, and never pile up."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.wait import HANG_S
from tests.unit.param_store.running_store import running_store
from torchrelay.common.health import Health
from torchrelay.common.net.probes import GrpcProbe
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.param_store.change_notifier import ChangeNotifier
from torchrelay.param_store.storage_checks import OwnThread, touch


async def test_healthy_store_has_no_fault(tmp_path: Path) -> None:
    async with running_store(tmp_path) as store, open_channel((await store.report()).grpc_address) as channel:
        assert await GrpcProbe(channel).ask() == ""


async def test_hung_disk_named_until_it_responds(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # To open a pipe takes until somebody opens its other end, as a file takes on a disk that is gone.
    health = Health({"disk": OwnThread("disk", lambda: pipe.read_bytes())}, {}, silent_s=0.2, ask_every_s=0)
    assert await health.fault() == "the disk does not answer"
    pipe.write_bytes(b"")
    async with asyncio.timeout(HANG_S):
        while await health.fault():
            pass
    await health.close()


async def test_held_arena_lock_reported() -> None:
    lock = threading.Lock()

    def ask_under_lock() -> None:
        with lock:
            pass

    health = Health({"arena": OwnThread("arena", ask_under_lock)}, {}, silent_s=0.2, ask_every_s=0)
    assert await health.fault() == ""
    with lock:
        assert await health.fault() == "the arena does not answer"
    async with asyncio.timeout(HANG_S):
        while await health.fault():
            pass
    await health.close()


def test_process_exits_while_disk_hangs(tmp_path: Path) -> None:
    script = """
import asyncio, os, sys
from torchrelay.common.health import Health
from torchrelay.param_store.storage_checks import OwnThread

os.mkfifo(sys.argv[1])

async def main():
    health = Health({"disk": OwnThread("disk", lambda: open(sys.argv[1]).read())}, {}, silent_s=0.1, ask_every_s=0)
    print(await health.fault())
    await health.close()

asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "pipe"], capture_output=True, text=True, timeout=HANG_S
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "the disk does not answer\n", "")


async def test_hung_disk_uses_one_thread() -> None:
    going_on, calls = threading.Event(), []
    ask = OwnThread("disk", lambda: calls.append(going_on.wait(HANG_S)))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ask()
    going_on.set()
    assert await ask() == "" and calls == [True]
    assert await ask() == "" and calls == [True, True]


def test_touch_leaves_no_file(tmp_path: Path) -> None:
    touch(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
async def test_full_disk_passes_and_failing_disk_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "touch", fail)
    fault = await Health({"disk": OwnThread("disk", lambda: touch(tmp_path))}, {}).fault()
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert fault == ("" if full else f"the disk fails: {os.strerror(number)}")


async def test_notification_reaches_every_listener() -> None:
    changes = ChangeNotifier(asyncio.get_running_loop())
    with changes.listen() as first, changes.listen() as second:
        for _ in range(3):
            threading.Thread(target=changes.notify).start()
            await asyncio.wait_for(first.wait(), HANG_S)
            await asyncio.wait_for(second.wait(), HANG_S)
            first.clear()
            second.clear()
            assert not first.is_set() and not second.is_set()
    changes.notify()
    await asyncio.sleep(0)
    assert not first.is_set() and not second.is_set()  # who left is told nothing


async def test_notifications_merged_into_one_wakeup() -> None:
    loop = asyncio.get_running_loop()
    changes = ChangeNotifier(loop)
    scheduled = 0
    original = loop.call_soon_threadsafe

    def counting(*args: object) -> object:
        nonlocal scheduled
        scheduled += 1
        return original(*args)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
    with changes.listen() as event:
        for _ in range(1000):
            changes.notify()
        await event.wait()
    assert scheduled == 1
