"""Signals that stop `up` and `join`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def stop_on_signals(stop: asyncio.Event, kill: Callable[[], None]) -> None:
    """Sets ``stop`` on SIGINT, SIGTERM and SIGHUP; calls ``kill`` on a SIGINT or SIGTERM after that.

    SIGINT may be blocked until then: the demo starts `up` like this.
    """

    def signalled() -> None:
        if stop.is_set():
            kill()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        # A terminal that closes may send it twice, by the shell and by the kernel: this is no request to kill.
        loop.add_signal_handler(signal.SIGHUP, stop.set)
