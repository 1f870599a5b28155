"""The load of `load.py` with the time of every event, for latencies as a user sees them.

    python -m bench.streaming.timed_load < jobs.json

Runs a list of such jobs in turn and prints the list of their figures, with `ttft_p50_ms` (from a request to its first
event), `tbt_p50_ms` (between two events) and `cpu_s` (CPU time of each process in the job's `workers` during the load).
Events that arrive together share the time since the previous event.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from bench.processes import cpu_s
from bench.streaming.load import EVENT, Connection, Totals, run


class Times:
    """Latencies of all connections, in seconds."""

    def __init__(self) -> None:
        self.first_s: list[float] = []
        self.between_s: list[float] = []


class TimedConnection(Connection):
    """Records the times of events."""

    def __init__(self, requests: Iterator[bytes], totals: Totals, times: Times) -> None:
        super().__init__(requests, totals)
        self._times = times
        self._last_s = 0.0

    def _next(self) -> None:
        self._last_s = 0.0
        super()._next()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        num_events = (self._tail[1 - len(EVENT) :] + data).count(EVENT)
        if num_events:
            if self._last_s:
                self._times.between_s += [(now_s - self._last_s) / num_events] * num_events
            else:
                self._times.first_s.append(now_s - self._begin_s)
            self._last_s = now_s
        super().data_received(data)


async def run_timed(job: dict[str, Any]) -> dict[str, Any]:
    times, before = Times(), [cpu_s(pid) for pid in job["workers"]]
    figures = await run(job, lambda requests, totals: TimedConnection(requests, totals, times))
    return {
        **figures,
        "cpu_s": [cpu_s(pid) - earlier for pid, earlier in zip(job["workers"], before, strict=True)],
        "ttft_p50_ms": statistics.median(times.first_s or [0.0]) * 1000,
        "tbt_p50_ms": statistics.median(times.between_s or [0.0]) * 1000,
    }


if __name__ == "__main__":
    print(json.dumps([uvloop.run(run_timed(job)) for job in json.load(sys.stdin)]))
