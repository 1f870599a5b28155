"""Tells coroutines that something changed, from any thread, with at most one notice queued."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ChangeNotifier:
    """A signal with any number of listeners; notices that come faster than they are read are merged."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listeners: set[asyncio.Event] = set()
        self._pending = False
        self._lock = threading.Lock()

    def notify(self) -> None:
        """May be called from any thread; never blocks."""
        with self._lock:
            if self._pending or self._loop.is_closed():
                return
            self._pending = True
        self._loop.call_soon_threadsafe(self._wake)

    @contextmanager
    def listen(self) -> Iterator[asyncio.Event]:
        """An event that is set at every change; the listener clears it before it looks."""
        event = asyncio.Event()
        self._listeners.add(event)
        try:
            yield event
        finally:
            self._listeners.discard(event)

    def _wake(self) -> None:
        with self._lock:
            self._pending = False
        for event in self._listeners:
            event.set()
