"""Notices cross from threads to coroutines, and never pile up."""

from __future__ import annotations

import asyncio
import threading

from tests.support.wait import HANG_S
from torchrelay.param_store.change_notifier import ChangeNotifier


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
