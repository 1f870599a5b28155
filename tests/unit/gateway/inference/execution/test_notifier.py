"""A notifier wakes on notifications and ticks without any."""

from __future__ import annotations

import asyncio

from torchrelay.gateway.inference.execution.notifier import Notifier


async def test_notifications_are_coalesced_and_none_is_lost() -> None:
    notifier = Notifier(10, lambda: 10)
    notifier.notify()
    notifier.notify()
    assert await notifier.wait()
    waiting = asyncio.ensure_future(notifier.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    notifier.notify()
    assert await waiting
    notifier.close()


async def test_notifier_ticks_without_notifications_until_closed() -> None:
    notifier = Notifier(0.01, lambda: 0.02)
    assert not await notifier.wait()
    assert not await notifier.wait()
    notifier.close()
    waiting = asyncio.ensure_future(notifier.wait())
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    waiting.cancel()


async def test_cancelled_wait_loses_no_notification() -> None:
    notifier = Notifier(10, lambda: 10)
    waiting = asyncio.ensure_future(notifier.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    notifier.notify()
    assert await notifier.wait()
    notifier.close()


async def test_pause_ignores_notifications_and_can_be_ended() -> None:
    notifier = Notifier(10, lambda: 10)
    await notifier.pause(0.01)
    notifier.end_pause()  # nobody pauses
    pausing = asyncio.ensure_future(notifier.pause(10))
    await asyncio.sleep(0)
    notifier.notify()
    await asyncio.sleep(0)
    assert not pausing.done()
    notifier.end_pause()
    await pausing
    assert await notifier.wait()
    notifier.close()
