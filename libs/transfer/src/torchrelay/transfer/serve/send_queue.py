"""The chunks one follower wants: filled by the thread that reads its frames, emptied by the one that sends."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class SendQueue:
    """Chunk numbers in the order requested, each once; bounded by the buffer's number of chunks."""

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
        """No more requests will arrive; ``pending`` raises this error from now on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def pending(self, timeout_s: float) -> list[int]:
        """All of them, without removing any; waits while there are none. Empty: none yet."""
        with self._changed:
            if not self._pending and self._error is None:
                self._changed.wait(timeout_s)
            if self._error is not None:
                raise self._error
            return list(self._pending)

    def take(self, index: int) -> bool:
        """Removes a chunk that is about to be sent; False: it was cancelled just now."""
        with self._changed:
            if index not in self._pending:
                return False
            del self._pending[index]
            return True
