"""The two ends of a KV stream: a holder of buffers, and a follower that takes one after the other at a steady pace.

    python relay_kv_stream.py hold    CLUSTER_KEY HOST PORT BUFFER_BYTES
    python relay_kv_stream.py follow  CLUSTER_KEY HOST PORT BUFFER_BYTES

A buffer is a prompt's KV: chunks as large as a layer's pages. The follower reads lines `SECONDS BYTES_PER_S` and
answers each with the seconds that its buffers took, as JSON. A buffer's time counts from the moment it was due,
whenever it was asked for, until its last byte is verified; every buffer is a stream of its own, as between workers.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.follow import Receiver, SourceAddress, follow
from torchrelay.transfer.holder import HolderServer
from torchrelay.transfer.tickets import TicketOffice, derive_node_key

_CHUNK_BYTES = 256 << 10
_BUFFER, _HOLDER, _FOLLOWER = "kv", "kv-holder", "kv-follower"
_MAX_AT_ONCE = 16
_FAR = 1 << 50


class _KvSink:
    """Room for one buffer. The digest that each frame carries is what its bytes are compared with, as a worker does."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._chunks = [memoryview(bytearray(size)) for size in sizes]

    def chunk(self, index: int) -> memoryview:
        return self._chunks[index]

    def digest(self, index: int) -> bytes | None:
        return None

    def accept(self, index: int) -> None:
        """Nothing to mark: ``follow`` yields it."""


def _sizes(buffer_bytes: int) -> list[int]:
    return [min(_CHUNK_BYTES, buffer_bytes - begin) for begin in range(0, buffer_bytes, _CHUNK_BYTES)]


def hold(cluster_key: bytes, host: str, port: int, buffer_bytes: int) -> None:
    buffer = MemoryBuffer(_BUFFER, _sizes(buffer_bytes))
    for index, size in enumerate(_sizes(buffer_bytes)):
        buffer.publish(index, secrets.token_bytes(size))
    server = HolderServer(_HOLDER, derive_node_key(cluster_key, _HOLDER), {_BUFFER: buffer}.get, host, port)
    server.start()
    sys.stdin.read()
    server.close()


class _Follower:
    def __init__(self, cluster_key: bytes, address: str, buffer_bytes: int) -> None:
        ticket = TicketOffice(cluster_key).issue(_BUFFER, _HOLDER, _FOLLOWER, _FAR)
        self._source = SourceAddress(_HOLDER, address, ticket)
        self._receiver = Receiver(_FOLLOWER, derive_node_key(cluster_key, _FOLLOWER))
        self._sizes = _sizes(buffer_bytes)

    def take(self, due: float) -> float:
        """One buffer; seconds since it was due."""
        sink = _KvSink(self._sizes)
        for _ in follow(_BUFFER, range(len(self._sizes)), [self._source], sink, self._receiver):
            pass
        return time.monotonic() - due

    def run(self, seconds: float, bytes_per_s: float) -> list[float]:
        """Buffers at a steady pace, however long each takes."""
        interval_s = sum(self._sizes) / bytes_per_s
        begin = time.monotonic()
        with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
            taking = []
            for number in range(int(seconds / interval_s)):
                due = begin + number * interval_s
                time.sleep(max(0.0, due - time.monotonic()))
                taking.append(pool.submit(self.take, due))
            return [taken.result() for taken in taking]


def main() -> None:
    structlog.configure(  # the answers are on standard output
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    role, cluster_key, host = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3]
    port, buffer_bytes = int(sys.argv[4]), int(sys.argv[5])
    if role == "hold":
        hold(cluster_key, host, port, buffer_bytes)
        return
    follower = _Follower(cluster_key, f"{host}:{port}", buffer_bytes)
    for line in sys.stdin:
        seconds, bytes_per_s = map(float, line.split())
        print(json.dumps(follower.run(seconds, bytes_per_s)), flush=True)


if __name__ == "__main__":
    main()
