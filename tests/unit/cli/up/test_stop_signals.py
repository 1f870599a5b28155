"""The signals that end `torchrelay up`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from torchrelay.cli.up.stop_signals import stop_on_signals


async def outcome(*sent: signal.Signals) -> tuple[bool, int]:
    """Whether the signals stop the platform, and how often they kill it."""
    stop, kills = asyncio.Event(), 0

    def kill() -> None:
        nonlocal kills
        kills += 1

    loop, handled = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, handled.set)
    stop_on_signals(stop, kill)
    for number in (*sent, signal.SIGUSR1):  # the loop handles them in this order
        os.kill(os.getpid(), number)
    await handled.wait()
    loop.remove_signal_handler(signal.SIGUSR1)
    return stop.is_set(), kills


@pytest.fixture
def hang_up() -> Iterator[None]:
    """Does what it does by default, even if `nohup` started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def ignored_hang_up(hang_up: None) -> None:
    """As `nohup` starts a program."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_second_signal_kills(number: signal.Signals) -> None:
    assert await outcome(number) == (True, 0)
    assert await outcome(number, number) == (True, 1)


async def test_repeated_hangup_stops_in_order(hang_up: None) -> None:
    assert await outcome(signal.SIGHUP, signal.SIGHUP) == (True, 0)


async def test_nohup_keeps_it_running(ignored_hang_up: None) -> None:
    assert await outcome(signal.SIGHUP) == (False, 0)
