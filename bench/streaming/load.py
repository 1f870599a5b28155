"""A cheap closed-loop load of streamed requests: it counts events and reads usage without further parsing.

    python -m bench.streaming.load < job.json

The job: {"host", "port", "path", "headers", "bodies", "num_requests", "concurrency"}; each connection sends the next
body as soon as its answer ends. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, cast

import uvloop

EVENT = b'data: {"id"'  # its quotes would be escaped inside a text
LAST = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
TAIL_BYTES = 1024  # enough for the usage and end events
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens":(\d+)')


class Totals:
    """Totals of all connections."""

    def __init__(self) -> None:
        self.events = self.bytes = self.requests = self.output_tokens = self.prompt_tokens = 0
        self.first_byte_s: list[float] = []
        self.errors: list[str] = []


class Connection(asyncio.Protocol):
    """A keep-alive connection with one request at a time."""

    def __init__(self, requests: Iterator[bytes], totals: Totals) -> None:
        self._requests, self._totals = requests, totals
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._begin_s = 0.0
        self._is_running = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        request = next(self._requests, None)
        self._is_running = request is not None
        if request is None:
            self._transport.close()
            return
        self._tail, self._begin_s = b"", time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        totals = self._totals
        if not self._tail:
            totals.first_byte_s.append(time.perf_counter() - self._begin_s)
            if not data.startswith(b"HTTP/1.1 200"):
                totals.errors.append(data[:300].decode(errors="replace"))
                self._transport.abort() if self._transport else None
                return
        totals.bytes += len(data)
        totals.events += (self._tail[1 - len(EVENT) :] + data).count(EVENT)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._tail.endswith(END) and LAST in self._tail:
            self._ended()

    def _ended(self) -> None:
        totals = self._totals
        totals.requests += 1
        if tokens := _TOKENS.search(self._tail):
            totals.output_tokens += int(tokens[1])
        if tokens := _PROMPT.search(self._tail):
            totals.prompt_tokens += int(tokens[1])
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_running:
            self._totals.errors.append(f"the connection ended: {error}")
        self.closed.set_result(None)


def request_bytes(job: dict[str, Any], body: dict[str, Any], *lines: str) -> bytes:
    """An HTTP request with the job's headers and further header ``lines``."""
    data = json.dumps(body).encode()
    head = [f"POST {job['path']} HTTP/1.1", f"Host: {job['host']}", "Content-Type: application/json"]
    head += [f"{name}: {value}" for name, value in job["headers"].items()]
    return "\r\n".join([*head, *lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


async def run(job: dict[str, Any], connection_of: Callable[[Iterator[bytes], Totals], Connection]) -> dict[str, Any]:
    """Sends the job's requests over its connections; returns figures."""
    bodies = cycle([request_bytes(job, body) for body in job["bodies"]])
    totals, requests = Totals(), islice(bodies, job["num_requests"])
    loop = asyncio.get_running_loop()
    begin_s = time.perf_counter()
    opening = [
        loop.create_connection(lambda: connection_of(requests, totals), job["host"], job["port"])
        for _ in range(job["concurrency"])
    ]
    await asyncio.gather(*(connection.closed for _, connection in await asyncio.gather(*opening)))
    seconds = time.perf_counter() - begin_s
    return {
        "seconds": seconds,
        "requests": totals.requests,
        "events": totals.events,
        "bytes": totals.bytes,
        "output_tokens": totals.output_tokens,
        "prompt_tokens": totals.prompt_tokens,
        "first_byte_p50_ms": statistics.median(totals.first_byte_s or [0.0]) * 1000,
        "num_errors": len(totals.errors),
        "first_error": totals.errors[0] if totals.errors else "",
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(json.load(sys.stdin), Connection))))
