"""The chunks that a follower wants: the thread that reads its frames adds them, the thread that sends takes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class SendQueue:
    """Requested chunk numbers in order, each once, so at most as many as the buffer has."""

    def __init__(self) -> None:
        self._pending: dict[int, None] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def add(self, indices: Iterable[int]) -> None:
        with self._changed:
            self._pending.update(dict.fromkeys(indices))
            self._changed.notify_all()

    def cancel(self, indices: Iterable[int]) -> None:
        with self._changed:
            for index in indices:
                self._pending.pop(index, None)

    def end(self, error: Exception) -> None:
        """Ends the queue: ``pending`` raises this error from now on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def pending(self, timeout_s: float) -> list[int]:
        """All pending chunks, without removing them; waits up to ``timeout_s`` while there are none."""
        with self._changed:
            if not self._pending and self._error is None:
                self._changed.wait(timeout_s)
            if self._error is not None:
                raise self._error
            return list(self._pending)

    def take(self, index: int) -> bool:
        """Removes a chunk that is about to be sent. False: it has just been cancelled."""
        with self._changed:
            if index not in self._pending:
                return False
            del self._pending[index]
            return True
