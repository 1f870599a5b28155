"""The two ends of a KV stream: a holder of buffers, and a follower that reads them at a steady rate.

    python kv_stream.py hold    CLUSTER_KEY HOST PORT
    python kv_stream.py follow  CLUSTER_KEY HOST PORT

A buffer is a prompt's KV, in chunks of a layer's pages. As between workers, every buffer is its own stream, opened when
the prefill starts; its KV is complete ``LEAD_S`` later. Both ends read lines
`BEGIN SECONDS BYTES_PER_S BUFFER_BYTES`, where BEGIN is a time of the machine's monotonic clock. The follower answers
each line with the seconds of its buffers as JSON, from the time when the KV was due until its last byte was verified.
"""

from __future__ import annotations

import json
import logging
import sched
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from torchrelay.transfer.buffers import MemoryBuffer
from torchrelay.transfer.fetch.follow import Receiver, SourceAddress, follow
from torchrelay.transfer.protocol.tickets import TicketIssuer, derive_node_key
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.tcp import TcpTransport

_CHUNK_BYTES = 256 << 10
_HOLDER, _FOLLOWER = "kv-holder", "kv-follower"
_MAX_AT_ONCE = 32
LEAD_S = 0.1
_FAR = 1 << 50


class _KvSink:
    """Memory for a buffer; each frame's digest is verified, as on a worker."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._chunks = [memoryview(bytearray(size)) for size in sizes]

    def chunk(self, index: int) -> memoryview:
        return self._chunks[index]

    def digest(self, index: int) -> bytes | None:
        return None

    def accept(self, index: int) -> None:
        """Does nothing: ``follow`` yields the chunk."""


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The buffers that a line asks for."""

    buffer_bytes: int
    dues: dict[str, float]  # by buffer id: when its KV is complete

    @classmethod
    def of(cls, line: str) -> _Schedule:
        begin, seconds, bytes_per_s, buffer_bytes = map(float, line.split())
        interval_s = buffer_bytes / bytes_per_s
        dues = [begin + number * interval_s for number in range(int(seconds / interval_s))]
        return cls(int(buffer_bytes), {f"kv-{due}": due for due in dues})

    @property
    def chunk_sizes(self) -> list[int]:
        return [min(_CHUNK_BYTES, self.buffer_bytes - begin) for begin in range(0, self.buffer_bytes, _CHUNK_BYTES)]


def hold(cluster_key: bytes, host: str, port: int) -> None:
    buffers: dict[str, MemoryBuffer] = {}

    def offer(buffer_id: str, data: bytes, sizes: Sequence[int]) -> None:
        buffer = buffers[buffer_id] = MemoryBuffer(buffer_id, sizes)
        for index, size in enumerate(sizes):
            buffer.chunk(index)[:] = data[:size]
        if len(buffers) > _MAX_AT_ONCE:
            del buffers[next(iter(buffers))]

    def publish(buffer_id: str) -> None:
        for index in range(buffers[buffer_id].num_chunks):
            buffers[buffer_id].publish(index)

    data = secrets.token_bytes(_CHUNK_BYTES)
    listener = TcpTransport().listen(host, port)
    server = HolderServer(_HOLDER, derive_node_key(cluster_key, _HOLDER), buffers.get, listener)
    server.start()
    for line in sys.stdin:
        schedule, timer = _Schedule.of(line), sched.scheduler(time.monotonic, time.sleep)
        for buffer_id, due in schedule.dues.items():
            timer.enterabs(due - LEAD_S, 0, offer, (buffer_id, data, schedule.chunk_sizes))
            timer.enterabs(due, 0, publish, (buffer_id,))
        timer.run()
    server.close()


class _Follower:
    def __init__(self, cluster_key: bytes, address: str) -> None:
        self._issuer, self._address = TicketIssuer(cluster_key), address
        self._receiver = Receiver(_FOLLOWER, derive_node_key(cluster_key, _FOLLOWER))

    def take(self, buffer_id: str, due: float, sizes: Sequence[int]) -> float:
        """Receives a buffer; returns seconds since its KV was due."""
        source = SourceAddress(_HOLDER, self._address, self._issuer.issue(buffer_id, _HOLDER, _FOLLOWER, _FAR))
        for _ in follow(buffer_id, range(len(sizes)), [source], _KvSink(sizes), self._receiver):
            pass
        return time.monotonic() - due

    def run(self, line: str) -> list[float]:
        """Starts buffers at a steady rate, however long each takes."""
        schedule = _Schedule.of(line)
        with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
            transfers = []
            for buffer_id, due in schedule.dues.items():
                time.sleep(max(0.0, due - LEAD_S - time.monotonic()))
                transfers.append(pool.submit(self.take, buffer_id, due, schedule.chunk_sizes))
            return [transfer.result() for transfer in transfers]


def main() -> None:
    structlog.configure(  # standard output has the answers
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    role, cluster_key, host = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3]
    port = int(sys.argv[4])
    if role == "hold":
        hold(cluster_key, host, port)
        return
    follower = _Follower(cluster_key, f"{host}:{port}")
    for line in sys.stdin:
        print(json.dumps(follower.run(line)), flush=True)


if __name__ == "__main__":
    main()
