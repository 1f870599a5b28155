"""Counts of this process's work on its devices since its start, which any thread may read. Imports nothing heavy."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Final, Protocol

COPIED_BYTES: Final[dict[str, float]] = defaultdict(float)  # by kind: weights, kv_in, kv_out
COPY_S: Final[dict[str, float]] = defaultdict(float)  # of the device, in these copies
DECODE_STEPS: Final[dict[str, float]] = defaultdict(float)  # batches with running choices: replayed, eager
COMPILED_KERNELS: Final[dict[str, float]] = defaultdict(float)  # by name
COMPILATION_S: Final[dict[str, float]] = defaultdict(float)  # by kernel
_MAX_RUNNING: Final = 256


class TimedEvent(Protocol):
    """A place in a stream of a device; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to a later event."""


class CopyTimes:
    """Counts the copies of one stream, each once a later copy starts after its end."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._running: deque[tuple[TimedEvent, TimedEvent, int]] = deque(maxlen=_MAX_RUNNING)

    def add(self, begin: TimedEvent, end: TimedEvent, num_bytes: int) -> None:
        while self._running and self._running[0][1].query():
            first, last, size = self._running.popleft()
            COPY_S[self._kind] += first.elapsed_time(last) / 1000
            COPIED_BYTES[self._kind] += size
        self._running.append((begin, end, num_bytes))
