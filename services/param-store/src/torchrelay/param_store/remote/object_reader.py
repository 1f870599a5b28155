"""Reads ranges of a remote object; an interrupted reply resumes after its last byte."""

# obstore returns replies in its own memory, so one copy, at about 10 GB/s, is unavoidable. Pieces smaller than a chunk
# keep that memory small, allow an immediate stop, and let an interrupted reply resume instead of starting over.

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import obstore
from obstore.store import ObjectStore as Client

from torchrelay.common.errors import DataCorrupted, Unavailable
from torchrelay.param_store.remote.object_errors import OBJECT_ERRORS, is_transient, platform_error
from torchrelay.param_store.remote.remote_store import RangeReader

_PIECE_BYTES = 256 << 10
_INITIAL_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 3.0


@dataclass(slots=True)
class Backoff:
    """Exponential backoff that gives up after ``give_up_s`` without progress. Pure; time is an argument."""

    give_up_s: float
    since_s: float
    num_failures: int = 0

    def progress(self, now_s: float) -> None:
        self.since_s, self.num_failures = now_s, 0

    def pause_s(self, now_s: float) -> float | None:
        """The maximum pause after a failure, of which the caller waits a random part; None: give up."""
        pause_s = min(_INITIAL_BACKOFF_S * 2.0**self.num_failures, _MAX_BACKOFF_S)
        self.num_failures += 1
        return None if now_s + pause_s - self.since_s > self.give_up_s else pause_s


class ObjectReader(RangeReader):
    """A reader that retries. ``client`` tries each request once and times out on silence."""

    def __init__(self, client: Client, key: str, scheme: str, give_up_s: float) -> None:
        self._client = client
        self._key = key
        self._scheme = scheme
        self._give_up_s = give_up_s

    def read_into(self, offset: int, view: memoryview, stop: threading.Event) -> None:
        backoff = Backoff(self._give_up_s, time.monotonic())
        done = 0
        while done < len(view):
            try:
                for piece in self._pieces(offset + done, offset + len(view)):
                    view[done : done + len(piece)] = piece
                    done += len(piece)
                    backoff.progress(time.monotonic())
                    if stop.is_set():
                        raise Unavailable(f"reading {self._key} was stopped")
            except OBJECT_ERRORS as error:
                self._wait(error, backoff, stop)
            else:
                if done < len(view):
                    raise DataCorrupted(f"{self._key} of the remote store ends at byte {offset + done}")

    def _pieces(self, begin: int, end: int) -> Iterator[bytes]:
        reply = obstore.get(self._client, self._key, options={"range": (begin, end)})
        return iter(reply.stream(min_chunk_size=_PIECE_BYTES))

    def _wait(self, error: Exception, backoff: Backoff, stop: threading.Event) -> None:
        """Waits for the next attempt. Raises the platform's error if there is none."""
        longest_s = backoff.pause_s(time.monotonic()) if is_transient(error) else None
        if longest_s is None:
            raise platform_error(error, self._key, self._scheme) from error
        if stop.wait(random.uniform(longest_s / 2, longest_s)):  # jitter, since readers fail together
            raise Unavailable(f"reading {self._key} was stopped") from error

    def read_again(self, offset: int, view: memoryview, stop: threading.Event) -> bool:
        self.read_into(offset, view, stop)  # the damage may have occurred in transit
        return True

    def close(self) -> None:
        """Does nothing: the connections belong to the store's pool."""
