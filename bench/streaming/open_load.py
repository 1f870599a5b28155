"""An open-loop load of streamed requests: each is sent when it is due, however many others are under way.

    python -m bench.streaming.open_load < job.json

The job: {"host", "port", "path", "headers", "requests": [{"at", "body"}], "comes_back"}; ``at`` in seconds from the
start. Prints the list of answers, one list of tries for each request: a client that is refused comes back when
`Retry-After` tells it to, if the job says so. Times are Unix seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from bench.streaming.load import EVENT

_READ_BYTES = 1 << 16


async def answered(job: dict[str, Any], request: dict[str, Any], begin: float) -> list[dict[str, Any]]:
    """All tries of one request."""
    await asyncio.sleep(max(begin + request["at"] - time.time(), 0.0))
    tries = [await tried(job, request["body"])]
    while tries[-1]["retry_after_s"] and job["comes_back"]:
        await asyncio.sleep(max(tries[-1]["ended_at"] + tries[-1]["retry_after_s"] - time.time(), 0.0))
        tries.append(await tried(job, request["body"]))
    return tries


async def tried(job: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """One try, on a connection of its own; ``first_at`` and ``last_at``: of its events, 0 without any."""
    data = json.dumps(body).encode()
    lines = [f"POST {job['path']} HTTP/1.1", f"Host: {job['host']}", "Content-Type: application/json"]
    lines += ["Connection: close", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in job["headers"].items()]
    reader, writer = await asyncio.open_connection(job["host"], job["port"])
    try:
        sent_at = time.time()
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        status, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in rest if line)
        first_at = last_at = 0.0
        num_events, tail = 0, b""
        while received := await reader.read(_READ_BYTES):
            tail = tail[1 - len(EVENT) :] + received
            if found := tail.count(EVENT):
                last_at = time.time()
                first_at, num_events = first_at or last_at, num_events + found
    finally:
        writer.close()
    return {
        "request_id": fields["x-request-id"],
        "status": int(status.split()[1]),
        "retry_after_s": float(fields.get("retry-after", 0)),
        "num_events": num_events,
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
