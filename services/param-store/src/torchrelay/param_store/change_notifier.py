"""Notifies coroutines of changes, from any thread, with at most one notification queued."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ChangeNotifier:
    """A signal with any number of listeners. Notifications faster than their listeners are merged."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listeners: set[asyncio.Event] = set()
        self._pending = False
        self._lock = threading.Lock()

    def notify(self) -> None:
        """Notifies all listeners. Any thread may call it; it never blocks."""
        with self._lock:
            if self._pending or self._loop.is_closed():
                return
            self._pending = True
        self._loop.call_soon_threadsafe(self._wake)

    @contextmanager
    def listen(self) -> Iterator[asyncio.Event]:
        """An event that is set at every change; the listener clears it before it reads the state."""
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
