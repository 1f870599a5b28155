"""Totals of a store's downloads by source, for its reports and metrics."""

from __future__ import annotations

import threading

PEER, REMOTE, DISK = SOURCES = "peer", "remote", "disk"  # the host's disk caches packs of the remote store


class TransferCounts:
    """Totals since the store started. Thread-safe; the numbers may be read at any time."""

    def __init__(self) -> None:
        self.num_bytes_received = dict.fromkeys(SOURCES, 0)
        self.num_damaged_chunks = dict.fromkeys(SOURCES, 0)  # received chunks that did not match their digests
        self._lock = threading.Lock()

    def count_received(self, source: str, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes_received[source] += num_bytes

    def count_damaged(self, source: str, num_chunks: int = 1) -> None:
        with self._lock:
            self.num_damaged_chunks[source] += num_chunks
