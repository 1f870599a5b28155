"""An open-loop load of streamed requests: each is sent when it is due, however many others are in progress.

    python -m bench.streaming.open_load < job.json

``open_job`` makes the job; ``at`` is in seconds from the start. Prints a list of answers, with a list of tries for each
request: if the job has ``comes_back``, a refused client tries again when `Retry-After` says so. ``has_failed``: there
was an error, also within a stream. Times are Unix seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import uvloop

from bench.streaming.load import EVENT, request_bytes

ERROR = b'{"error"'  # of a stream that has begun, or the whole body
_READ_BYTES = 1 << 16


def open_job(url: str, key: str, requests: Sequence[dict[str, Any]], *, comes_back: bool = False) -> dict[str, Any]:
    """A job of ``requests``, each with ``at`` and ``body``, to the REST address ``url``."""
    place = urlsplit(url)
    return {
        "host": place.hostname,
        "port": place.port,
        "path": "/v1/completions",
        "headers": {"Authorization": f"Bearer {key}"},
        "requests": requests,
        "comes_back": comes_back,
    }


async def answered(job: dict[str, Any], request: dict[str, Any], begin: float) -> list[dict[str, Any]]:
    """All tries of a request."""
    await asyncio.sleep(max(begin + request["at"] - time.time(), 0.0))
    tries = [await tried(job, request["body"])]
    while tries[-1]["retry_after_s"] and job["comes_back"]:
        await asyncio.sleep(max(tries[-1]["ended_at"] + tries[-1]["retry_after_s"] - time.time(), 0.0))
        tries.append(await tried(job, request["body"]))
    return tries


async def tried(job: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Tries a request on a new connection; ``first_at`` and ``last_at`` are times of events, 0 without any."""
    reader, writer = await asyncio.open_connection(job["host"], job["port"])
    try:
        sent_at = time.time()
        writer.write(request_bytes(job, body, "Connection: close"))
        status, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in rest if line)
        first_at = last_at = 0.0
        num_events, tail, has_failed = 0, b"", False
        while received := await reader.read(_READ_BYTES):
            has_failed = has_failed or ERROR in tail[1 - len(ERROR) :] + received
            tail = tail[1 - len(EVENT) :] + received
            if count := tail.count(EVENT):
                last_at = time.time()
                first_at, num_events = first_at or last_at, num_events + count
    finally:
        writer.close()
    return {
        "request_id": fields["x-request-id"],
        "status": int(status.split()[1]),
        "retry_after_s": float(fields.get("retry-after", 0)),
        "num_events": num_events,
        "has_failed": has_failed,
        "sent_at": sent_at,
        "first_at": first_at,
        "last_at": last_at,
        "ended_at": time.time(),
    }


async def run(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    begin = time.time()
    return await asyncio.gather(*(answered(job, request, begin) for request in job["requests"]))


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(json.load(sys.stdin)))))
